"""The pictures of a set of runs: rounds, epsilon, clip norm, accuracy (of regression: R2) against epsilon and against
what was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from discreet.reporting import drawing
from discreet.reporting.drawing import DASHES, INK, REST, SERIES, Picture, canvas, draw_line, log_axis, to_svg
from discreet.reporting.ratings import is_rated
from discreet.reporting.records import (
    SCORE,
    Group,
    RunRecord,
    group_runs,
    matters,
    score_word,
    setting_text,
    short_names,
    tried_settings,
)
from discreet.reporting.spending import epsilon_curves, guarantee_names

DIVERGED = 30.0  # largest over smallest loss beyond which the axis is logarithmic
MOST_EFFECTS = 10  # pictures of what a setting does
MOST_TICKS = 6  # if no more values were tried, the ticks are at the values
WIDE = 10.0  # largest over smallest value of a setting from which its axis is logarithmic
QUANTILE = "privacy.user.clip.target_quantile"
# Settings that follow from one another: along a line of one of them the others may move too.
MOVE_TOGETHER = (
    ("privacy.user.noise_multiplier", "privacy.user.max_epsilon", "privacy.user.target_epsilon"),
    ("privacy.example.noise_multiplier", "privacy.example.max_epsilon", "privacy.example.target_epsilon"),
    ("privacy.local.noise_multiplier", "privacy.local.max_epsilon", "privacy.local.epsilon"),
    ("data.num_clients", "privacy.delta"),
)

_MEANS = "Thick lines are means over runs that differ only in their seed; the thin lines of that colour are the runs."
_CLIPPING = (
    "The fraction is what the server learns, with its noise. An adaptive clip norm moves until it is the target "
    "quantile (dotted). With a fixed clip norm the server asks for no fraction."
)
_ONE_RUN = "One run, round by round: what more rounds bring, and what they cost."
_FRONTIER = (
    "Each point is what a run spent and the {score} of its model. Ringed and joined: the frontier, the settings that "
    "no other setting beats in both (by the mean {score} of a setting's runs, with a bar of one standard deviation to "
    "either side). Reading the best setting off this picture is a choice, which costs privacy too: see what choosing "
    "costs."
)
_EFFECT = (
    "Of the runs' models. A line joins runs that are alike in everything else that was tried. Repetitions are shown "
    "as their mean, with a bar of one standard deviation to either side."
)
_MEAN_LINE = "The thick line is the mean of the thin lines that have every value."


@dataclass(frozen=True, eq=False)
class ColouredGroups:
    """The groups of a page, and by its label the number of each group that has a colour and a marker of its own.

    If there are more groups than colours, only the best groups are coloured; the others are thin and grey.
    """

    groups: tuple[Group, ...]
    numbers: Mapping[str, int]

    @property
    def legend(self) -> tuple[tuple[int, str], ...]:
        """Number and label of each coloured group; empty if there is a single group."""
        if len(self.groups) == 1:
            return ()
        rows = sorted((number, label) for label, number in self.numbers.items())
        more = len(self.groups) - len(rows)
        return (*rows, *(((REST, f"{more} more, in grey"),) if more else ()))

    @property
    def score(self) -> str:
        """What the score of the runs is called."""
        return score_word(record for group in self.groups for record in group.records)

    @property
    def repeated(self) -> bool:
        """Whether a group has more than one run."""
        return any(len(group.records) > 1 for group in self.groups)

    def number(self, group: Group) -> int:
        """The number of a group's colour, or `REST`."""
        return self.numbers.get(group.label, REST)


def coloured(records: Sequence[RunRecord]) -> ColouredGroups:
    """The groups of these runs with their colours."""
    groups = tuple(group_runs(records))
    best = sorted(groups, key=lambda group: group.score, reverse=True)[: len(SERIES)]
    shown = [group for group in groups if group in best]
    return ColouredGroups(groups, {group.label: number for number, group in enumerate(shown)})


def pictures_of(records: Sequence[RunRecord]) -> list[Picture]:
    """Every picture that the runs have numbers for, in the order of the page."""
    runs, guarantees = coloured(records), guarantee_names(records)
    return [
        *_per_round(runs, SCORE, f"{runs.score.capitalize()} after each round"),
        *_per_round(runs, "loss", "Loss after each round"),
        *(_epsilon_per_round(runs, name) for name in guarantees),
        *_clip_norm(runs),
        *(_trade_off(runs, name) for name in guarantees),
        *_effects(records, runs.groups),
    ]


def _per_round(runs: ColouredGroups, column: str, title: str) -> Iterator[Picture]:
    """Of a column that was measured on a public test set; what clients say is in `rated_pictures`."""
    records = [record for group in runs.groups for record in group.records]
    if all(is_rated(record) for record in records) or not any(record.series(column) for record in records):
        return
    by = "public test set or clients" if any(map(is_rated, records)) else "public test set"
    with canvas() as (figure, (axes,)):
        for group in runs.groups:
            draw_group(axes, group, column, number=runs.number(group))
        values = [value for group in runs.groups for record in group.records for _, value in record.series(column)]
        # A run that diverges must not press all others flat.
        if values and min(values) > 0 and max(values) > DIVERGED * min(values) and max(values) > 1:
            log_axis(axes, "y", values)
        axes.set_ylabel(f"{runs.score if column == SCORE else column}, {by}")
        count_rounds(axes, runs)
        yield Picture(
            title, to_svg(figure, title), runs.legend, _MEANS if runs.repeated else "", aside=column == "loss"
        )


def draw_group(axes: Any, group: Group, column: str, *, number: int) -> None:
    """The mean of a group's runs round by round, and if the group has a colour each of the runs behind it, thin."""
    if len(group.records) > 1 and number != REST:
        for record in group.records:
            xs, ys = zip(*record.series(column), strict=True) if record.series(column) else ((), ())
            axes.plot(xs, ys, color=SERIES[number], linewidth=0.6, alpha=0.35, zorder=1)
    draw_line(axes, group.mean_series(column), number)


def count_rounds(axes: Any, runs: ColouredGroups) -> None:
    """Ticks at whole rounds; the last tick is the last round that was done."""
    from matplotlib.ticker import MaxNLocator

    last = max(record.rounds[-1]["round"] or 1.0 for group in runs.groups for record in group.records)
    ticks = [float(tick) for tick in MaxNLocator(6, integer=True).tick_values(1, last) if 1 <= tick < last]
    axes.set_xlabel("round")
    drawing.place_ticks(axes, [*ticks, last])


def _epsilon_per_round(runs: ColouredGroups, guarantee: str) -> Picture:
    """Epsilon by every accountant if there is one setting; by the runs' own accountants if there are several."""
    title = f"Epsilon after each round: {guarantee}-level"
    configs = [record.config.privacy for group in runs.groups for record in group.records]
    deltas = ", ".join(sorted({f"{privacy.delta:g}" for privacy in configs}))
    with canvas() as (figure, (axes,)):
        if len(runs.groups) == 1:
            curves = epsilon_curves(runs.groups[0].records[0], guarantee)
            for place, curve in enumerate(curves.values()):
                draw_line(axes, curve, place, linestyle=DASHES[place % len(DASHES)])
            legend, note = tuple(enumerate(curves)), f"At delta {deltas}, by every accountant: all of them hold."
        else:
            for group in runs.groups:
                draw_line(axes, group.records[0].series(f"epsilon_{guarantee}"), runs.number(group))
            accountants = ", ".join(sorted({privacy.accountant for privacy in configs}))
            legend, note = runs.legend, f"At delta {deltas}, by the runs' own accountant ({accountants})."
        axes.set_ylabel("epsilon")
        axes.set_ylim(bottom=0)
        count_rounds(axes, runs)
        return Picture(title, to_svg(figure, title), legend, note, aside=len(runs.groups) > 1)


def _clip_norm(runs: ColouredGroups) -> Iterator[Picture]:
    shown = [group for group in runs.groups if group.records[0].config.privacy.user.enabled]
    if not shown:
        return
    clips = [group.records[0].config.privacy.user.clip for group in shown]
    title = "Clip norm, and the fraction of updates below it"
    with canvas(rows=2, height=1.5 * drawing.SIZE[1]) as (figure, (upper, lower)):
        for group in shown:
            draw_group(upper, group, "clip_norm", number=runs.number(group))
            draw_group(lower, group, "fraction_below", number=runs.number(group))
        log_axis(upper, "y", [value for group in shown for _, value in group.records[0].series("clip_norm")])
        upper.set_ylabel("clip norm")
        lower.set_ylabel("fraction below")
        for target in {clip.target_quantile for clip in clips if clip.kind == "adaptive"}:
            lower.axhline(target, color=INK, linewidth=0.9, linestyle="dotted")
        count_rounds(lower, runs)
        note = f"{_CLIPPING} {_MEANS}" if runs.repeated else _CLIPPING
        yield Picture(title, to_svg(figure, title), runs.legend, note, aside=True)


def _trade_off(runs: ColouredGroups, guarantee: str) -> Picture:
    title = f"{runs.score.capitalize()} against epsilon: {guarantee}-level"
    paying = [group for group in runs.groups if group.records[0].series(f"epsilon_{guarantee}")]
    with canvas() as (figure, (axes,)):
        for group in paying:
            for record in group.records:
                scores, spent = dict(record.series(SCORE)), record.series(f"epsilon_{guarantee}")
                path = [(epsilon, scores[number]) for number, epsilon in spent if number in scores]
                if len(runs.groups) == 1:
                    draw_line(axes, path, runs.number(group))
                elif (score := record.of_model(SCORE)) is not None:
                    drawing.draw_dots(axes, [(record.epsilon(guarantee), score)], runs.number(group))
            drawing.draw_spread(axes, group.epsilon(guarantee), group.values(SCORE))
        if len(runs.groups) > 1:
            _mark_frontier(axes, [(group.epsilon(guarantee), group.score) for group in paying])
        baseline = _draw_baseline(axes, runs.groups)
        axes.set_xlabel("epsilon")
        axes.set_ylabel(runs.score)
        words = _ONE_RUN if len(runs.groups) == 1 else _FRONTIER.format(score=runs.score)
        note = f"{words} {baseline}".strip()
        return Picture(title, to_svg(figure, title), runs.legend, note)


def _mark_frontier(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    kept = [points[index] for index in frontier(points)]
    if kept:
        xs, ys = zip(*kept, strict=True)
        axes.plot(xs, ys, color=INK, linewidth=0.9, drawstyle="steps-post", zorder=1)
        axes.plot(xs, ys, color=INK, linestyle="none", marker="o", markersize=9, fillstyle="none")


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the (cost, value) points that no other point beats, by rising cost.

    A point is beaten by one that costs no more and is worth no less, and is better in one of the two. Equal points
    are both kept; points with a cost or a value that is not finite are left out.

    >>> frontier([(1.0, 0.7), (2.0, 0.6), (3.0, 0.9)])
    [0, 2]
    """
    usable = [index for index, point in enumerate(points) if all(map(math.isfinite, point))]
    kept: list[int] = []
    for index in sorted(usable, key=lambda index: (points[index][0], -points[index][1])):
        if not kept or points[index][1] > points[kept[-1]][1] or points[index] == points[kept[-1]]:
            kept.append(index)
    return kept


def _draw_baseline(axes: Any, groups: Sequence[Group]) -> str:
    """A dashed line at the best score without any guarantee; gives the words on it, or none if there is no such
    group among several."""
    plain = [group for group in groups if not any(each.enabled for each in group.records[0].guarantees)]
    if not plain or len(groups) == 1:
        return ""
    best = max(plain, key=lambda group: group.score)
    axes.axhline(best.score, color=INK, linewidth=0.9, linestyle="dashed")
    return f"Dashed: without privacy, {best.score:.4f} ({best.label})."


def _effects(records: Sequence[RunRecord], groups: Sequence[Group]) -> Iterator[Picture]:
    """A picture for each number that was tried, privacy settings first; at most ten, and one of the clip norm."""
    tried = tried_settings(records)
    numeric = [name for name in tried if len({v for g in groups if (v := _number(g, name)) is not None}) > 1]
    numeric.sort(key=lambda name: not name.startswith(("privacy", "sampling", "data")))
    for name in numeric[:MOST_EFFECTS]:
        yield _effect(groups, name, tried, SCORE)
    if QUANTILE in numeric:
        yield _effect(groups, QUANTILE, tried, "clip_norm")


def _number(group: Group, name: str) -> float | None:
    """A group's value of a setting; None if the setting is no number, or decides nothing in these runs."""
    record = group.records[0]
    value = record.settings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not matters(record, name):
        return None
    return float(value)


def _effect(groups: Sequence[Group], name: str, tried: Sequence[str], column: str) -> Picture:
    score = score_word(record for group in groups for record in group.records)
    outcome = {SCORE: score.capitalize(), "clip_norm": "Last clip norm"}[column]
    short, lines = short_names(tried)[name], _lines(groups, name, tried, column)
    title, named = f"{outcome} against {short}", len(lines) <= len(SERIES)
    with canvas() as (figure, (axes,)):
        for number, pairs in enumerate(lines.values()):
            draw_line(axes, sorted(pairs), number if named else REST, linestyle=DASHES[number % len(DASHES)])
            if not named:
                drawing.draw_dots(axes, pairs, REST)
        for group in groups:
            if (value := _number(group, name)) is not None:
                drawing.draw_spread(axes, value, group.values(column))
        baseline = _draw_baseline(axes, groups) if column == SCORE else ""
        if not named:
            draw_line(axes, mean_line(list(lines.values())), 0)
        _scale(axes, sorted({value for pairs in lines.values() for value, _ in pairs}))
        axes.set_xlabel(short)
        axes.set_ylabel(outcome.lower())
        legend = tuple(enumerate(lines)) if named and len(lines) > 1 else ()
        note = " ".join(filter(None, (_EFFECT, "" if named else _MEAN_LINE, baseline)))
        return Picture(title, to_svg(figure, title), legend, note)


def mean_line(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of the lines that have every value. With the others in it, it would jump where one of them ends."""
    values = sorted({value for pairs in lines for value, _ in pairs})
    whole = [dict(pairs) for pairs in lines if len(pairs) == len(values)]
    return [(value, fmean(line[value] for line in whole)) for value in values if whole]


def _lines(
    groups: Sequence[Group], name: str, tried: Sequence[str], column: str
) -> dict[str, list[tuple[float, float]]]:
    """(value, mean of the column) of the groups, by the settings that stay the same along a line."""
    short = short_names(tried)
    together = {other for family in MOVE_TOGETHER if name in family for other in family} | {name}
    lines: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        record, value = group.records[0], _number(group, name)
        if value is None:
            continue
        same = [other for other in tried if other not in together and matters(record, other)]
        label = ", ".join(f"{short[other]} {setting_text(record.settings.get(other))}" for other in same)
        lines.setdefault(label or "all runs", []).append((value, fmean(group.values(column))))
    return lines


def _scale(axes: Any, distinct: Sequence[float]) -> None:
    if distinct[0] > 0 and distinct[-1] >= WIDE * distinct[0]:
        log_axis(axes, "x", distinct)
    if len(distinct) <= MOST_TICKS:
        drawing.place_ticks(axes, distinct)
