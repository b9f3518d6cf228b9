"""Pictures of a set of runs, as SVG in one style: scores, loss, epsilon and the clip norm over the
rounds, and the score against epsilon."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from discreet.reporting.final_pictures import final_pictures
from discreet.reporting.records import SCORE, Group, RunRecord, group_runs, score_word
from discreet.reporting.shape_pictures import shape_pictures
from discreet.reporting.spending import epsilon_curves, guarantee_names
from discreet.reporting.svg_style import INK, MARKERS, MUTED, SERIES, Picture, picture
from discreet.settings.adjacency import USER

BALANCED = "balanced_accuracy"
AUC = "auc"
FURTHER = {BALANCED: "Balanced accuracy", AUC: "AUC"}
WIDE = 10.0  # ratio of largest to smallest clip norm from which their axis is logarithmic

_LINE = {"color": INK, "linewidth": 0.9}
_MEANS = "Lines are means over runs that differ only in their seed, engine, account or operations."
_RATED = (
    "Bars are one standard error of what clients said, by the noise and the chance of who "
    "was asked."
)
_CLIPPING = (
    "The fraction is what the server learns, with its noise. An adaptive clip norm moves until it "
    "is the target "
    "quantile (dotted)."
)
_SPREAD = "Bars are one standard deviation of a setting's runs to either side."
_FRONTIER = (
    "Each point is what a setting spent and the mean {score} of its models. Ringed and joined: "
    "the settings that no "
    "other one beats in both. Reading the best setting off this picture is a choice, which costs "
    "privacy too."
)


def pictures_of(records: Sequence[RunRecord]) -> list[Picture]:
    """Every picture for which the runs have numbers, in the order of the page; those of epsilon for
    each guarantee. If there are more settings than colours, those with the best scores are
    coloured."""
    groups = group_runs(records)
    guarantees = guarantee_names(records)
    best = sorted(groups, key=lambda group: (not group.scores, -group.score))[: len(SERIES)]
    groups.sort(key=lambda group: group not in best)
    return [
        *_scores(groups, records),
        *_losses(groups),
        *(_epsilon(groups, records, name) for name in guarantees),
        *(_trade_off(groups, name) for name in guarantees if any(group.scores for group in groups)),
        *_clip_norm(groups),
        *(final_pictures(records[0].test_set) if len(records) == 1 and records[0].test_set else ()),
        *(shape_pictures(records[0].shapes) if len(records) == 1 and records[0].shapes else ()),
    ]


def _draw(
    axes: Any, pairs: Sequence[tuple[float, float]], number: int, label: str, **more: Any
) -> None:
    """Draws a line in the colour of series `number`, with about eight markers; beyond the last
    colour, thin and grey."""
    look: dict[str, Any] = {"color": MUTED, "linewidth": 0.6, "alpha": 0.5, "zorder": 1}
    if number < len(SERIES):
        look = {"color": SERIES[number], "marker": MARKERS[number], "label": label}
    if pairs:
        axes.plot(*zip(*pairs, strict=True), **look, markevery=max(1, len(pairs) // 8), **more)


def _draw_groups(axes: Any, groups: Sequence[Group], column: str) -> str:
    """Draws a line for each group, and returns the note that some are means; empty if none is."""
    for number, group in enumerate(groups):
        _draw(axes, group.mean_series(column), number, group.label)
    if any(len(group.records) > 1 for group in groups):
        return _MEANS
    return ""


def _count_rounds(axes: Any) -> None:
    """Sets ticks at whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _scores(groups: Sequence[Group], records: Sequence[RunRecord]) -> Iterator[Picture]:
    """The score by which models are compared, and the further scores of runs with imbalanced
    classes."""
    shown = [group for group in groups if group.mean_series(SCORE)]
    if shown:
        yield _score(shown, records)
    for name in (BALANCED, AUC):
        rated = [group for group in groups if group.mean_series(name)]
        if rated and name != score_word(records):
            yield _further(rated, name)


def _further(groups: Sequence[Group], name: str) -> Picture:
    words = FURTHER[name]

    def draw(axes: Any) -> str:
        means = _draw_groups(axes, groups, name)
        axes.axhline(0.5, **_LINE, linestyle="dotted")
        axes.set_ylabel(f"{words}")
        _count_rounds(axes)
        return f"{means} Dotted: a model that has learned nothing.".strip()

    return picture(f"{words} after each round", draw)


def _losses(groups: Sequence[Group]) -> Iterator[Picture]:
    shown = [group for group in groups if group.mean_series("loss")]

    def draw(axes: Any) -> str:
        means = _draw_groups(axes, shown, "loss")
        axes.set_ylabel(f"loss, {_raters(shown)}")
        _count_rounds(axes)
        constant = _draw_constant(axes, shown, "loss", "what a constant guess has")
        return f"{means} {constant}".strip()

    if shown:
        yield picture("Loss after each round", draw)


def _draw_constant(axes: Any, groups: Sequence[Group], key: str, words: str) -> str:
    """Draws a dotted line at the value of a constant guess on the public test set, and returns the
    note on it; empty if runs know none, or several, or if clients rated one."""
    records = [record for group in groups for record in group.records]
    if any(record.is_rated for record in records):
        return ""
    values = {(record.constant or {}).get(key) for record in records}
    if len(values) != 1 or (value := values.pop()) is None:
        return ""
    axes.axhline(value, **_LINE, linestyle="dotted")
    return f"Dotted: {words}, {value:.4g}."


def _score(groups: Sequence[Group], records: Sequence[RunRecord]) -> Picture:
    word = score_word(records)

    def draw(axes: Any) -> str:
        means = _draw_groups(axes, groups, SCORE)
        notes = [_draw_errors(axes, groups), means]
        axes.set_ylabel(f"{word}, {_raters(groups)}")
        _count_rounds(axes)
        if word == "accuracy":
            notes.append(
                _draw_constant(axes, groups, "share", "the share of the most frequent class")
            )
        return " ".join(filter(None, notes))

    return picture(f"{word.capitalize()} after each round", draw)


def _raters(groups: Sequence[Group]) -> str:
    """The words for who rated the models."""
    rated = {record.is_rated for group in groups for record in group.records}
    if len(rated) > 1:
        return "test set or clients"
    if True in rated:
        return "by clients"
    return "public test set"


def _draw_errors(axes: Any, groups: Sequence[Group]) -> str:
    """Draws a bar of one standard error at each score that clients gave a single run, and returns
    the note on them; empty if there are none."""
    note = ""
    for number, group in enumerate(groups):
        record = group.records[0]
        points = [
            (at, each.value, each.error)
            for at, each in record.ratings
            if each.name == record.score_name and each.known
        ]
        if points and len(group.records) == 1:
            rounds, values, errors = zip(*points, strict=True)
            colour = SERIES[number] if number < len(SERIES) else MUTED
            axes.errorbar(rounds, values, yerr=errors, color=colour, alpha=0.5, fmt="none")
            note = _RATED
    return note


def _epsilon(groups: Sequence[Group], records: Sequence[RunRecord], guarantee: str) -> Picture:
    """Epsilon by every accountant for a single setting; by the runs' own accountants for
    several."""
    drawn = [record.config.privacy for record in records if record.series(f"epsilon_{guarantee}")]
    by = ", ".join(sorted({privacy.accountant for privacy in drawn}))
    deltas = ", ".join(sorted({f"{privacy.delta:g}" for privacy in drawn}))
    curves = {group.label: group.records[0].series(f"epsilon_{guarantee}") for group in groups}
    if len(groups) == 1:
        curves = epsilon_curves(records[0], guarantee)
        by = "every accountant: all of them hold"

    def draw(axes: Any) -> str:
        for number, (name, curve) in enumerate(curves.items()):
            _draw(axes, curve, number, name)
        axes.set_ylabel("epsilon")
        axes.set_ylim(bottom=0)
        _count_rounds(axes)
        return f"At delta {deltas}, by {by}."

    return picture(f"Epsilon after each round: {guarantee}-level", draw)


def _trade_off(groups: Sequence[Group], guarantee: str) -> Picture:
    score = score_word(record for group in groups for record in group.records)
    points = [(group.epsilon(guarantee), group.score) for group in groups]

    def draw(axes: Any) -> str:
        axes.set_xlabel("epsilon")
        axes.set_ylabel(score)
        if len(groups) == 1:
            scores = dict(groups[0].mean_series(SCORE))
            spent = groups[0].mean_series(f"epsilon_{guarantee}")
            _draw(
                axes,
                [(epsilon, scores[at]) for at, epsilon in spent if at in scores],
                0,
                groups[0].label,
            )
            return "One setting, round by round: what more rounds bring, and what they cost."
        for number, (group, point) in enumerate(zip(groups, points, strict=True)):
            if math.isfinite(point[0]):
                _draw(axes, [point], number, group.label, linestyle="none")
        ringed = {"marker": "o", "fillstyle": "none", "drawstyle": "steps-post"}
        axes.plot(*zip(*frontier(points), strict=True), **_LINE, **ringed)
        notes = [_FRONTIER.format(score=score), _draw_spread(axes, groups, points)]
        return " ".join(filter(None, [*notes, _draw_baseline(axes, groups)]))

    return picture(f"{score.capitalize()} against epsilon: {guarantee}-level", draw)


def _draw_spread(axes: Any, groups: Sequence[Group], points: Sequence[tuple[float, float]]) -> str:
    """Draws a bar at each point of a setting with several scores, and returns the note on them;
    empty if there are none."""
    note = ""
    for group, point in zip(groups, points, strict=True):
        if math.isfinite(point[0]) and len(group.scores) > 1:
            spread = statistics.stdev(group.scores)
            axes.errorbar(*point, yerr=spread, **_LINE, capsize=3, fmt="none", zorder=3)
            note = _SPREAD
    return note


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto frontier of (cost, value) points, by rising cost.

    A point is left out if another one costs no more and is worth no less, and is better in one of
    the two. Equal points are both kept; points with a cost or a value that is not finite are left
    out.

    >>> frontier([(1.0, 0.7), (2.0, 0.6), (3.0, 0.9), (math.inf, 1.0), (0.5, math.nan)])
    [(1.0, 0.7), (3.0, 0.9)]
    """
    usable = [point for point in points if all(map(math.isfinite, point))]
    return sorted(
        point
        for point in usable
        if not any(e <= point[0] and v >= point[1] and (e, v) != point for e, v in usable)
    )


def _draw_baseline(axes: Any, groups: Sequence[Group]) -> str:
    """Draws a dashed line at the best score without any guarantee, and returns the note on it;
    empty if there is no such group."""
    plain = [group for group in groups if not group.records[0].plan.is_private]
    if not plain:
        return ""
    best = max(plain, key=lambda group: group.score)
    axes.axhline(best.score, **_LINE, linestyle="dashed")
    return f"Dashed: without privacy, {best.score:.4f} ({best.label})."


def _clip_norm(groups: Sequence[Group]) -> Iterator[Picture]:
    shown = [group for group in groups if USER in group.records[0].plan.mechanisms]

    def draw(upper: Any, lower: Any) -> str:
        means = _draw_groups(upper, shown, "clip_norm")
        _draw_groups(lower, shown, "fraction_below")
        norms = [norm for group in shown for _, norm in group.mean_series("clip_norm")]
        if norms and 0 < WIDE * min(norms) < max(norms):
            upper.set_yscale("log")
            upper.yaxis.set_major_formatter("{x:g}")
        upper.set_ylabel("clip norm")
        lower.set_ylabel("fraction below")
        clips = [group.records[0].config.privacy.user.clip for group in shown]
        for target in {clip.target_quantile for clip in clips if clip.kind == "adaptive"}:
            lower.axhline(target, **_LINE, linestyle="dotted")
        _count_rounds(lower)
        return f"{_CLIPPING} {means}".strip()

    # Only for adaptive clip norms: a fixed one is constant and has no such fraction.
    if any(group.mean_series("fraction_below") for group in shown):
        yield picture("Clip norm, and the fraction of updates below it", draw, rows=2)
