"""Which colour and marker each group of runs has in every picture of a page, and lines in them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discreet.reporting.drawing import INK, MARKERS, MUTED, SERIES
from discreet.reporting.records import Group, RunRecord, group_runs

Pairs = Sequence[tuple[float, float]]
REST = -1  # the number of the groups without a colour of their own, in a legend


@dataclass(frozen=True, eq=False)
class Cast:
    """The groups of a page, and the number of the colour and marker of each that has one, by its label.

    With more groups than colours only the most accurate ones have one; the others are thin and grey.
    """

    groups: tuple[Group, ...]
    numbers: Mapping[str, int]

    @property
    def legend(self) -> tuple[tuple[int, str], ...]:
        """Empty where there is a single group."""
        if len(self.groups) == 1:
            return ()
        rows = sorted((number, label) for label, number in self.numbers.items())
        more = len(self.groups) - len(rows)
        return (*rows, *(((REST, f"{more} more, in grey"),) if more else ()))

    def number(self, group: Group) -> int:
        """Of a group's colour, or `REST`."""
        return self.numbers.get(group.label, REST)


def cast_of(records: Sequence[RunRecord]) -> Cast:
    """The cast of a page about these runs."""
    groups = tuple(group_runs(records))
    shown = groups
    if len(groups) > len(SERIES):
        best = sorted(groups, key=final_accuracy, reverse=True)[: len(SERIES)]
        shown = tuple(group for group in groups if group in best)
    return Cast(groups, {group.label: number for number, group in enumerate(shown)})


def final_accuracy(group: Group) -> float:
    """The mean over a group's runs of the accuracy after their last round."""
    return statistics.fmean(final_values(group, "accuracy"))


def final_values(group: Group, column: str) -> list[float]:
    """The values of a column after the last round of each run of a group."""
    return [record.last(column) or 0.0 for record in group.records]


def baseline_of(groups: Sequence[Group]) -> Group | None:
    """Of the groups without any guarantee, the most accurate one; None if there is none."""
    plain = [group for group in groups if not any(each.enabled for each in group.records[0].guarantees)]
    return max(plain, key=final_accuracy, default=None)


def final_epsilon(group: Group, guarantee: str) -> float:
    """The largest epsilon of a group's runs."""
    return max(record.epsilon(guarantee) for record in group.records)


def mean_series(group: Group, column: str) -> Pairs:
    """(round, mean over a group's runs), of the rounds that each of them has."""
    runs = [dict(record.series(column)) for record in group.records]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    return [(number, sum(run[number] for run in runs) / len(runs)) for number in rounds]


def draw_group(axes: Any, group: Group, column: str, *, number: int) -> None:
    """A group's runs round by round: their mean, and behind it each of them, thin, where the group has a colour."""
    if len(group.records) > 1 and number != REST:
        for record in group.records:
            xs, ys = zip(*record.series(column), strict=True) if record.series(column) else ((), ())
            axes.plot(xs, ys, color=SERIES[number], linewidth=0.6, alpha=0.35, zorder=1)
    draw_line(axes, mean_series(group, column), number)


def draw_line(axes: Any, pairs: Pairs, number: int, **more: Any) -> None:
    """A line in the colour of its group; without one, thin and grey and behind the others."""
    if not pairs:
        return
    xs, ys = zip(*pairs, strict=True)
    if number == REST:
        axes.plot(xs, ys, **({"color": MUTED, "linewidth": 0.6, "alpha": 0.5, "zorder": 1} | more))
        return
    every = max(1, len(xs) // 8)
    look = {"color": SERIES[number], "marker": MARKERS[number], "markevery": (number % every, every)}
    axes.plot(xs, ys, **(look | more))


def draw_baseline(axes: Any, groups: Sequence[Group]) -> str:
    """A dashed line at the accuracy of what was trained without any guarantee; gives the words on it, or none."""
    baseline = baseline_of(groups)
    if baseline is None or len(groups) == 1:
        return ""
    axes.axhline(final_accuracy(baseline), color=INK, linewidth=0.9, linestyle="dashed")
    return f"Dashed: without privacy, {final_accuracy(baseline):.4f} ({baseline.label})."


def draw_spread(axes: Any, place: float, values: Sequence[float]) -> None:
    """A bar of one standard deviation to either side of the mean of repetitions; nothing for a single run."""
    if len(values) > 1:
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        axes.errorbar([place], [mean], yerr=[deviation], color=INK, linewidth=0.9, capsize=3, fmt="none", zorder=3)


def draw_dots(axes: Any, pairs: Pairs, number: int) -> None:
    """Points in the colour and with the marker of their group."""
    if pairs:
        xs, ys = zip(*pairs, strict=True)
        colour, marker = (MUTED, ".") if number == REST else (SERIES[number], MARKERS[number])
        axes.plot(xs, ys, color=colour, marker=marker, linestyle="none", markersize=5)
