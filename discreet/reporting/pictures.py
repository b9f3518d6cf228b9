"""The four pictures of a set of runs: the score, epsilon and the clip norm over the rounds, and the score against
epsilon."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from discreet.reporting.drawing import INK, SERIES, Picture, draw_line, picture
from discreet.reporting.records import SCORE, Group, RunRecord, group_runs, score_word
from discreet.reporting.spending import epsilon_curves, guarantee_names
from discreet.settings.privacy import USER

WIDE = 10.0  # largest over smallest clip norm from which their axis is logarithmic
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
    """Every picture that the runs have numbers for, in the order of the page: those of epsilon for each guarantee."""
    groups, guarantees = coloured(records), guarantee_names(records)
    return [
        _score(groups, records),
        *(_epsilon(groups, records, name) for name in guarantees),
        *(_trade_off(groups, name) for name in guarantees),
        *_clip_norm(groups),
    ]


def coloured(records: Sequence[RunRecord]) -> list[Group]:
    """The groups of these runs, in order; if there are more than colours, those with the best scores come first."""
    groups = group_runs(records)
    best = sorted(groups, key=lambda group: -group.score)[: len(SERIES)]
    return sorted(groups, key=lambda group: group not in best)


def _score(groups: Sequence[Group], records: Sequence[RunRecord]) -> Picture:
    word, rated = score_word(records), {record.is_rated for record in records}

    def draw(axes: Any) -> str:
        _draw_groups(axes, groups, SCORE)
        if True in rated:
            draw_errors(axes, groups[0].records[0], word)
        by = "test set or clients" if len(rated) > 1 else "by clients" if True in rated else "public test set"
        axes.set_ylabel(f"{word}, {by}")
        _count_rounds(axes)
        repeated = any(len(group.records) > 1 for group in groups)
        return " ".join([_RATED] * (True in rated) + [_MEANS] * repeated)

    return picture(f"{word.capitalize()} after each round", draw)


def _draw_groups(axes: Any, groups: Sequence[Group], column: str) -> None:
    for number, group in enumerate(groups):
        draw_line(axes, group.mean_series(column), number, group.label)


def draw_errors(axes: Any, record: RunRecord, name: str) -> None:
    """Bars of one standard error to either side of each rating by a number."""
    points = [(number, each) for number, each in record.ratings if each.name == name and each.known]
    rounds, values = [number for number, _ in points], [each.value for _, each in points]
    axes.errorbar(rounds, values, yerr=[each.error for _, each in points], color=SERIES[0], alpha=0.5, fmt="none")


def _count_rounds(axes: Any) -> None:
    """Ticks at whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _epsilon(groups: Sequence[Group], records: Sequence[RunRecord], guarantee: str) -> Picture:
    """Epsilon by every accountant if there is one setting; by the runs' own accountants if there are several."""
    by = ", ".join(sorted({record.config.privacy.accountant for record in records}))
    curves = {group.label: group.records[0].series(f"epsilon_{guarantee}") for group in groups}
    if len(groups) == 1:
        curves, by = epsilon_curves(records[0], guarantee), "every accountant: all of them hold"

    def draw(axes: Any) -> str:
        for number, (name, curve) in enumerate(curves.items()):
            draw_line(axes, curve, number, name)
        axes.set_ylabel("epsilon")
        axes.set_ylim(bottom=0)
        _count_rounds(axes)
        return f"At delta {', '.join(sorted({f'{record.config.privacy.delta:g}' for record in records}))}, by {by}."

    return picture(f"Epsilon after each round: {guarantee}-level", draw)


def _trade_off(groups: Sequence[Group], guarantee: str) -> Picture:
    score = score_word(record for group in groups for record in group.records)
    points = [(group.epsilon(guarantee), group.score) for group in groups]

    def draw(axes: Any) -> str:
        axes.set_xlabel("epsilon")
        axes.set_ylabel(score)
        if len(groups) == 1:
            scores, spent = dict(groups[0].mean_series(SCORE)), groups[0].mean_series(f"epsilon_{guarantee}")
            draw_line(axes, [(epsilon, scores[at]) for at, epsilon in spent if at in scores], 0, groups[0].label)
            return "One run, round by round: what more rounds bring, and what they cost."
        for number, (group, point) in enumerate(zip(groups, points, strict=True)):
            if math.isfinite(point[0]):
                draw_line(axes, [point], number, group.label, linestyle="none")
                _draw_spread(axes, point[0], group)
        ringed = {"color": INK, "linewidth": 0.9, "marker": "o", "fillstyle": "none", "drawstyle": "steps-post"}
        axes.plot(*zip(*frontier(points), strict=True), **ringed)
        return f"{_FRONTIER.format(score=score)} {_draw_baseline(axes, groups)}"

    return picture(f"{score.capitalize()} against epsilon: {guarantee}-level", draw)


def _draw_spread(axes: Any, place: float, group: Group) -> None:
    """A bar of one standard deviation to either side of the mean of repetitions; nothing for a single run."""
    if len(group.scores) > 1:
        look = {"color": INK, "linewidth": 0.9, "capsize": 3, "fmt": "none", "zorder": 3}
        axes.errorbar([place], [group.score], yerr=[statistics.stdev(group.scores)], **look)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (cost, value) points that no other point beats, by rising cost.

    A point is beaten by one that costs no more and is worth no less, and is better in one of the two. Equal points
    are both kept; points with a cost or a value that is not finite are left out.

    >>> frontier([(1.0, 0.7), (2.0, 0.6), (3.0, 0.9), (math.inf, 1.0), (0.5, math.nan)])
    [(1.0, 0.7), (3.0, 0.9)]
    """
    usable = [point for point in points if all(map(math.isfinite, point))]
    return sorted(
        point for point in usable if not any(e <= point[0] and v >= point[1] and (e, v) != point for e, v in usable)
    )


def _draw_baseline(axes: Any, groups: Sequence[Group]) -> str:
    """A dashed line at the best score without any guarantee, and the words on it; empty if there is no such group."""
    plain = [group for group in groups if not any(each.enabled for each in group.records[0].guarantees)]
    if not plain:
        return ""
    best = max(plain, key=lambda group: group.score)
    axes.axhline(best.score, color=INK, linewidth=0.9, linestyle="dashed")
    return f"Dashed: without privacy, {best.score:.4f} ({best.label})."


def _clip_norm(groups: Sequence[Group]) -> Iterator[Picture]:
    shown = [group for group in groups if USER in group.records[0].plan.mechanisms]

    def draw(upper: Any, lower: Any) -> str:
        _draw_groups(upper, shown, "clip_norm")
        _draw_groups(lower, shown, "fraction_below")
        norms = [norm for group in shown for _, norm in group.mean_series("clip_norm")]
        if norms and 0 < WIDE * min(norms) < max(norms):
            upper.set_yscale("log")
            upper.yaxis.set_major_formatter("{x:g}")
        upper.set_ylabel("clip norm")
        lower.set_ylabel("fraction below")
        clips = [group.records[0].config.privacy.user.clip for group in shown]
        for target in {clip.target_quantile for clip in clips if clip.kind == "adaptive"}:
            lower.axhline(target, color=INK, linewidth=0.9, linestyle="dotted")
        _count_rounds(lower)
        return _CLIPPING

    if shown:
        yield picture("Clip norm, and the fraction of updates below it", draw, rows=2)
