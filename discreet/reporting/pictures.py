"""The pictures of a set of runs: score and epsilon over rounds, the clip norm, and the score against epsilon and
against each number that was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from discreet.reporting.drawing import INK, SERIES, Picture, canvas, draw_line, draw_spread, log_axis, to_svg
from discreet.reporting.ratings import known_points, names_in
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

MOST_EFFECTS = 6  # pictures of what a setting does
WIDE = 10.0  # largest over smallest value from which an axis is logarithmic
# Settings that follow from one another: along a line of one of them the others may move too.
MOVE_TOGETHER = (
    *(
        tuple(f"privacy.{level}.{name}" for name in ("noise_multiplier", "max_epsilon", "target_epsilon", "epsilon"))
        for level in ("user", "example", "local")
    ),
    ("data.num_clients", "privacy.delta"),
)
_MEANS = "Lines are means over runs that differ only in their seed; bars are one standard deviation to either side."
_RATED = "Bars are one standard error of what clients said, by the noise and the chance of who was asked."
_CLIPPING = (
    "The fraction is what the server learns, with its noise. An adaptive clip norm moves until it is the target "
    "quantile (dotted)."
)
_FRONTIER = (
    "Each point is what a setting spent and the mean {score} of its models. Ringed and joined: the settings that no "
    "other one beats in both. Reading the best setting off this picture is a choice, which costs privacy too."
)


def pictures_of(records: Sequence[RunRecord]) -> list[Picture]:
    """Every picture that the runs have numbers for, in the order of the page."""
    groups, guarantees = coloured(records), guarantee_names(records)
    numbers = names_in(records) if len(records) == 1 else []
    return [
        *_per_round(groups, SCORE),
        *(_rated(records[0], name) for name in numbers if name != records[0].score_name),
        *(_epsilon(groups, name) for name in guarantees),
        *(_trade_off(groups, name) for name in guarantees),
        *_effects(records, groups),
        *_clip_norm(groups),
        *_per_round(groups, "loss"),
    ]


def coloured(records: Sequence[RunRecord]) -> list[Group]:
    """The groups of these runs, in order; if there are more than colours, those with the best scores come first."""
    groups = group_runs(records)
    if len(groups) <= len(SERIES):
        return groups
    best = sorted(groups, key=lambda group: group.score, reverse=True)[: len(SERIES)]
    return [*(group for group in groups if group in best), *(group for group in groups if group not in best)]


def _per_round(groups: Sequence[Group], column: str) -> Iterator[Picture]:
    if not any(record.series(column) for group in groups for record in group.records):
        return
    word = score_word(record for group in groups for record in group.records) if column == SCORE else column
    rated = {record.is_rated for group in groups for record in group.records}
    by = {frozenset({True}): "clients", frozenset({False}): "public test set"}.get(
        frozenset(rated), "test set or clients"
    )
    title = f"{word.capitalize()} after each round"
    with canvas() as (figure, (axes,)):
        _draw_groups(axes, groups, column)
        if True in rated:
            draw_errors(axes, groups[0].records[0], word)
        axes.set_ylabel(f"{word}, by {by}" if by == "clients" else f"{word}, {by}")
        _count_rounds(axes, groups)
        repeated = any(len(group.records) > 1 for group in groups)
        yield Picture(title, to_svg(figure, title), " ".join([_RATED] * (True in rated) + [_MEANS] * repeated))


def _draw_groups(axes: Any, groups: Sequence[Group], column: str) -> None:
    """A line a group; an axis of values that diverge is logarithmic, so that they do not press the others flat."""
    for number, group in enumerate(groups):
        draw_line(axes, group.mean_series(column), number, group.label)
    found = [value for group in groups for record in group.records for _, value in record.series(column)]
    if column in ("loss", "clip_norm") and found and min(found) > 0 and max(found) > WIDE * min(found):
        log_axis(axes, "y", found)


def _rated(record: RunRecord, name: str) -> Picture:
    title = f"{name.replace('_', ' ').capitalize()} after each rating, by clients"
    with canvas() as (figure, (axes,)):
        draw_line(axes, [(point.round, point.rated.value) for point in known_points(record, name)], 0, name)
        draw_errors(axes, record, name)
        _count_rounds(axes, group_runs([record]))
        return Picture(title, to_svg(figure, title), _RATED)


def draw_errors(axes: Any, record: RunRecord, name: str) -> None:
    """Bars of one standard error to either side of each rating by a number."""
    points = known_points(record, name)
    rounds, values = [point.round for point in points], [point.rated.value for point in points]
    axes.errorbar(rounds, values, yerr=[point.rated.error for point in points], color=SERIES[0], alpha=0.5, fmt="none")


def _count_rounds(axes: Any, groups: Sequence[Group]) -> None:
    """Ticks at whole rounds; the last tick is the last round that was done."""
    from matplotlib.ticker import MaxNLocator

    last = max(record.rounds[-1]["round"] or 1.0 for group in groups for record in group.records)
    ticks = [float(tick) for tick in MaxNLocator(6, integer=True).tick_values(1, last) if 1 <= tick < 0.93 * last]
    axes.set_xlabel("round")
    axes.set_xticks([*ticks, last], [f"{tick:g}" for tick in (*ticks, last)])


def _epsilon(groups: Sequence[Group], guarantee: str) -> Picture:
    """Epsilon by every accountant if there is one setting; by the runs' own accountants if there are several."""
    title = f"Epsilon after each round: {guarantee}-level"
    configs = [record.config.privacy for group in groups for record in group.records]
    deltas = ", ".join(sorted({f"{privacy.delta:g}" for privacy in configs}))
    with canvas() as (figure, (axes,)):
        if len(groups) == 1:
            for number, (name, curve) in enumerate(epsilon_curves(groups[0].records[0], guarantee).items()):
                draw_line(axes, curve, number, name)
            note = f"At delta {deltas}, by every accountant: all of them hold."
        else:
            for number, group in enumerate(groups):
                draw_line(axes, group.records[0].series(f"epsilon_{guarantee}"), number, group.label)
            note = f"At delta {deltas}, by {', '.join(sorted({privacy.accountant for privacy in configs}))}."
        axes.set_ylabel("epsilon")
        axes.set_ylim(bottom=0)
        _count_rounds(axes, groups)
        return Picture(title, to_svg(figure, title), note)


def _clip_norm(groups: Sequence[Group]) -> Iterator[Picture]:
    shown = [group for group in groups if group.records[0].config.privacy.user.enabled]
    if not shown:
        return
    clips = [group.records[0].config.privacy.user.clip for group in shown]
    title = "Clip norm, and the fraction of updates below it"
    with canvas(rows=2) as (figure, (upper, lower)):
        _draw_groups(upper, shown, "clip_norm")
        _draw_groups(lower, shown, "fraction_below")
        upper.set_ylabel("clip norm")
        lower.set_ylabel("fraction below")
        for target in {clip.target_quantile for clip in clips if clip.kind == "adaptive"}:
            lower.axhline(target, color=INK, linewidth=0.9, linestyle="dotted")
        _count_rounds(lower, groups)
        yield Picture(title, to_svg(figure, title), _CLIPPING)


def _trade_off(groups: Sequence[Group], guarantee: str) -> Picture:
    score = score_word(record for group in groups for record in group.records)
    title = f"{score.capitalize()} against epsilon: {guarantee}-level"
    paying = [group for group in groups if group.records[0].series(f"epsilon_{guarantee}")]
    with canvas() as (figure, (axes,)):
        for number, group in enumerate(groups):
            if len(groups) == 1:
                scores, spent = dict(group.mean_series(SCORE)), group.mean_series(f"epsilon_{guarantee}")
                draw_line(axes, [(epsilon, scores[at]) for at, epsilon in spent if at in scores], 0, group.label)
            elif group in paying:
                draw_line(axes, [(group.epsilon(guarantee), group.score)], number, group.label, linestyle="none")
                draw_spread(axes, group.epsilon(guarantee), group.values(SCORE))
        note = "One run, round by round: what more rounds bring, and what they cost."
        if len(groups) > 1:
            points = [(group.epsilon(guarantee), group.score) for group in paying]
            best = [points[index] for index in frontier(points)]
            xs, ys = [epsilon for epsilon, _ in best], [score for _, score in best]
            axes.plot(xs, ys, color=INK, linewidth=0.9, drawstyle="steps-post", marker="o", fillstyle="none")
            note = f"{_FRONTIER.format(score=score)} {_draw_baseline(axes, groups)}".strip()
        axes.set_xlabel("epsilon")
        axes.set_ylabel(score)
        return Picture(title, to_svg(figure, title), note)


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
    """A dashed line at the best score without any guarantee, and the words on it; empty if there is no such group."""
    plain = [group for group in groups if not any(each.enabled for each in group.records[0].guarantees)]
    if not plain:
        return ""
    best = max(plain, key=lambda group: group.score)
    axes.axhline(best.score, color=INK, linewidth=0.9, linestyle="dashed")
    return f"Dashed: without privacy, {best.score:.4f} ({best.label})."


def _effects(records: Sequence[RunRecord], groups: Sequence[Group]) -> Iterator[Picture]:
    """A picture for each number that was tried, privacy settings first."""
    tried = tried_settings(records)
    numeric = [name for name in tried if len({_number(group, name) for group in groups} - {None}) > 1]
    numeric.sort(key=lambda name: not name.startswith(("privacy", "sampling", "data")))
    for name in numeric[:MOST_EFFECTS]:
        yield _effect(groups, name, tried)


def _number(group: Group, name: str) -> float | None:
    """A group's value of a setting; None if the setting is no number, or decides nothing in these runs."""
    value = group.records[0].settings.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not matters(group.records[0], name):
        return None
    return float(value)


def _effect(groups: Sequence[Group], name: str, tried: Sequence[str]) -> Picture:
    """A line joins groups that are alike in everything else that was tried."""
    score, short = score_word(record for group in groups for record in group.records), short_names(tried)
    title = f"{score.capitalize()} against {short[name]}"
    together = {other for family in MOVE_TOGETHER if name in family for other in family} | {name}
    lines: dict[str, list[tuple[float, float]]] = {}
    with canvas() as (figure, (axes,)):
        for group in groups:
            record, value = group.records[0], _number(group, name)
            if value is not None:
                same = [other for other in tried if other not in together and matters(record, other)]
                label = ", ".join(f"{short[other]} {setting_text(record.settings.get(other))}" for other in same)
                lines.setdefault(label, []).append((value, fmean(group.values(SCORE))))
                draw_spread(axes, value, group.values(SCORE))
        for number, (label, pairs) in enumerate(lines.items()):
            draw_line(axes, sorted(pairs), number if len(lines) <= len(SERIES) else len(SERIES), label)
        values = sorted({value for pairs in lines.values() for value, _ in pairs})
        if values[0] > 0 and values[-1] >= WIDE * values[0]:
            log_axis(axes, "x", values)
        axes.set_xlabel(short[name])
        axes.set_ylabel(score)
        note = f"A line joins runs that are alike in everything else that was tried. {_draw_baseline(axes, groups)}"
        return Picture(title, to_svg(figure, title), note.strip())
