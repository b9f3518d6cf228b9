"""Which pictures a set of runs gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from discreet.reporting.drawing import DASHES, INK, SIZE, Picture, canvas, log_axis, place_ticks, to_svg
from discreet.reporting.effects import effects_of
from discreet.reporting.epsilons import epsilon_curves, guarantee_names
from discreet.reporting.frontier import frontier
from discreet.reporting.records import Group, RunRecord
from discreet.reporting.series import (
    Cast,
    cast_of,
    draw_baseline,
    draw_dots,
    draw_group,
    draw_line,
    draw_spread,
    final_accuracy,
    final_epsilon,
    final_values,
)

DIVERGED = 30.0  # largest over smallest loss beyond which the axis is logarithmic


def pictures_of(records: Sequence[RunRecord]) -> list[Picture]:
    """Every picture that the runs have numbers for, in the order of the page."""
    cast = cast_of(records)
    guarantees = guarantee_names(records)
    return [
        _per_round(cast, "accuracy", "Accuracy after each round"),
        _per_round(cast, "loss", "Loss after each round"),
        *(_epsilon_per_round(cast, name) for name in guarantees),
        *_clip_norm(cast),
        *(_trade_off(cast, name) for name in guarantees),
        *effects_of(records),
    ]


def _per_round(cast: Cast, column: str, title: str) -> Picture:
    with canvas() as (figure, (axes,)):
        for group in cast.groups:
            draw_group(axes, group, column, number=cast.number(group))
        _stretch(
            axes, [value for group in cast.groups for record in group.records for _, value in record.series(column)]
        )
        axes.set_ylabel(f"{column}, public test set")
        _count_rounds(axes, cast)
        note = _MEANS if _repeated(cast) else ""
        return Picture(title, to_svg(figure, title), cast.legend, note, aside=column == "loss")


def _repeated(cast: Cast) -> bool:
    return any(len(group.records) > 1 for group in cast.groups)


def _stretch(axes: Any, values: Sequence[float]) -> None:
    """A run that diverges must not press all others flat."""
    if values and min(values) > 0 and max(values) > DIVERGED * min(values) and max(values) > 1:
        log_axis(axes, "y", values)


def _count_rounds(axes: Any, cast: Cast) -> None:
    """Whole rounds, the last of them the last one that was done."""
    from matplotlib.ticker import MaxNLocator

    rounds = [record.rounds[-1]["round"] or 1.0 for group in cast.groups for record in group.records]
    last = max(rounds)
    ticks = [float(tick) for tick in MaxNLocator(6, integer=True).tick_values(1, last) if 1 <= tick < last]
    axes.set_xlabel("round")
    place_ticks(axes, [*ticks, last])


def _epsilon_per_round(cast: Cast, guarantee: str) -> Picture:
    """Of one setting by every accountant; of several each by its own."""
    title = f"Epsilon after each round: {guarantee}-level"
    configs = [record.config.privacy for group in cast.groups for record in group.records]
    deltas = ", ".join(sorted({f"{privacy.delta:g}" for privacy in configs}))
    with canvas() as (figure, (axes,)):
        if len(cast.groups) == 1:
            curves = epsilon_curves(cast.groups[0].records[0], guarantee)
            for place, curve in enumerate(curves.values()):
                draw_line(axes, curve, place, linestyle=DASHES[place % len(DASHES)])
            legend, note = tuple(enumerate(curves)), f"At delta {deltas}, by every accountant: all of them hold."
        else:
            for group in cast.groups:
                draw_line(axes, group.records[0].series(f"epsilon_{guarantee}"), cast.number(group))
            accountants = ", ".join(sorted({privacy.accountant for privacy in configs}))
            legend, note = cast.legend, f"At delta {deltas}, by the runs' own accountant ({accountants})."
        axes.set_ylabel("epsilon")
        axes.set_ylim(bottom=0)
        _count_rounds(axes, cast)
        return Picture(title, to_svg(figure, title), legend, note, aside=len(cast.groups) > 1)


def _clip_norm(cast: Cast) -> list[Picture]:
    shown = [group for group in cast.groups if group.records[0].config.privacy.user.enabled]
    clips = [group.records[0].config.privacy.user.clip for group in shown]
    if not shown:
        return []
    title = "Clip norm, and the fraction of updates below it"
    with canvas(rows=2, height=1.5 * SIZE[1]) as (figure, (upper, lower)):
        for group in shown:
            draw_group(upper, group, "clip_norm", number=cast.number(group))
            draw_group(lower, group, "fraction_below", number=cast.number(group))
        log_axis(upper, "y", [value for group in shown for _, value in group.records[0].series("clip_norm")])
        upper.set_ylabel("clip norm")
        lower.set_ylabel("fraction below")
        for target in {clip.target_quantile for clip in clips if clip.kind == "adaptive"}:
            lower.axhline(target, color=INK, linewidth=0.9, linestyle="dotted")
        _count_rounds(lower, cast)
        note = f"{_CLIPPING} {_MEANS}" if _repeated(cast) else _CLIPPING
        return [Picture(title, to_svg(figure, title), cast.legend, note, aside=True)]


_CLIPPING = (
    "The fraction is what the server learns, with its noise. An adaptive clip norm moves until it is the target "
    "quantile (dotted); with a fixed one no fraction is asked for."
)
_MEANS = "Thick lines are means over runs that differ in nothing but their seed, thin ones of their colour the runs."
_WAY = "One run, round by round: what more rounds bring, and what they cost."
_FRONTIER = (
    "Each point is the end of a run. Ringed and joined: the frontier, settings that no other one beats in both (the "
    "mean accuracy of a setting's runs, with a bar of one standard deviation to either side). To read the best off "
    "this picture is a choice, which costs privacy too: see what choosing costs."
)


def _trade_off(cast: Cast, guarantee: str) -> Picture:
    title = f"Accuracy against epsilon: {guarantee}-level"
    paying = [group for group in cast.groups if group.records[0].series(f"epsilon_{guarantee}")]
    single = len(paying) == 1 and len(cast.groups) == 1
    with canvas() as (figure, (axes,)):
        for group in paying:
            for record in group.records:
                accuracies, spent = dict(record.series("accuracy")), record.series(f"epsilon_{guarantee}")
                path = [(epsilon, accuracies[number]) for number, epsilon in spent if number in accuracies]
                if single:
                    draw_line(axes, path, cast.number(group))
                else:
                    draw_dots(axes, path[-1:], cast.number(group))
            draw_spread(axes, final_epsilon(group, guarantee), final_values(group, "accuracy"))
        if not single:
            _mark_frontier(axes, paying, guarantee)
        baseline = draw_baseline(axes, cast.groups)
        axes.set_xlabel("epsilon")
        axes.set_ylabel("accuracy")
        note = f"{_WAY if single else _FRONTIER} {baseline}".strip()
        return Picture(title, to_svg(figure, title), cast.legend, note)


def _mark_frontier(axes: Any, groups: Sequence[Group], guarantee: str) -> None:
    points = [(final_epsilon(group, guarantee), final_accuracy(group)) for group in groups]
    kept = [points[index] for index in frontier(points)]
    if kept:
        xs, ys = zip(*kept, strict=True)
        axes.plot(xs, ys, color=INK, linewidth=0.9, drawstyle="steps-post", zorder=1)
        axes.plot(xs, ys, color=INK, linestyle="none", marker="o", markersize=9, fillstyle="none")
