"""What a setting does to accuracy: a picture for each number in which the runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from discreet.reporting.drawing import DASHES, SERIES, Picture, canvas, log_axis, place_ticks, to_svg
from discreet.reporting.records import Group, RunRecord, group_runs, matters, setting_text, short_names, tried_settings
from discreet.reporting.series import REST, draw_baseline, draw_dots, draw_line, draw_spread, final_values

MOST_PICTURES = 10
MOST_TICKS = 6  # where no more values were tried, they are the ticks
WIDE = 10.0  # a setting whose largest value is so many times its smallest is drawn on a logarithmic axis
# Settings that follow from one another: along a line of one of them the others may move too.
MOVE_TOGETHER = (
    ("privacy.user.noise_multiplier", "privacy.user.max_epsilon", "privacy.user.target_epsilon"),
    ("privacy.example.noise_multiplier", "privacy.example.max_epsilon", "privacy.example.target_epsilon"),
    ("privacy.local.noise_multiplier", "privacy.local.max_epsilon", "privacy.local.epsilon"),
    ("data.num_clients", "privacy.delta"),
)
QUANTILE = "privacy.user.clip.target_quantile"


@dataclass(frozen=True)
class Outcome:
    """What came out of a group of runs: a name, and its column of metrics.csv."""

    name: str
    column: str

    def of(self, group: Group) -> float:
        """The mean over a group's runs, after their last round."""
        return fmean(final_values(group, self.column))


ACCURACY = Outcome("Accuracy", "accuracy")
CLIP_NORM = Outcome("Last clip norm", "clip_norm")


def effects_of(records: Sequence[RunRecord]) -> list[Picture]:
    """A picture for each number that was tried, privacy settings first; at most ten."""
    tried = tried_settings(records)
    numeric = [name for name in tried if len(_values(records, name)) > 1]
    numeric.sort(key=lambda name: not name.startswith(("privacy", "sampling", "data")))
    groups = group_runs(records)
    drawn = [_effect(groups, name, tried, ACCURACY) for name in numeric[:MOST_PICTURES]]
    return [*drawn, *([_effect(groups, QUANTILE, tried, CLIP_NORM)] if QUANTILE in numeric else [])]


def _values(records: Sequence[RunRecord], name: str) -> set[float]:
    values = [record.settings.get(name) for record in records if matters(record, name)]
    return {float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)}


def _effect(groups: Sequence[Group], name: str, tried: Sequence[str], outcome: Outcome) -> Picture:
    short = short_names(tried)
    title = f"{outcome.name} against {short[name]}"
    lines = _lines(groups, name, tried, outcome)
    named = len(lines) <= len(SERIES)
    with canvas() as (figure, (axes,)):
        for number, pairs in enumerate(lines.values()):
            draw_line(axes, sorted(pairs), number if named else REST, linestyle=DASHES[number % len(DASHES)])
            if not named:
                draw_dots(axes, pairs, REST)
        for group in groups:
            if matters(group.records[0], name) and name in _numbers(group):
                draw_spread(axes, _numbers(group)[name], final_values(group, outcome.column))
        baseline = draw_baseline(axes, groups) if outcome is ACCURACY else ""
        if not named:
            draw_line(axes, mean_line(list(lines.values())), 0)
        _scale(axes, [value for pairs in lines.values() for value, _ in pairs])
        axes.set_xlabel(short[name])
        axes.set_ylabel(outcome.name.lower())
        legend = tuple(enumerate(lines)) if named and len(lines) > 1 else ()
        note = " ".join(filter(None, (_NOTE, "" if named else _MEAN, baseline)))
        return Picture(title, to_svg(figure, title), legend, note)


def _numbers(group: Group) -> dict[str, float]:
    """The settings of a group that are numbers."""
    settings = group.records[0].settings.items()
    return {name: float(v) for name, v in settings if isinstance(v, int | float) and not isinstance(v, bool)}


_NOTE = (
    "After the last round; a line joins runs that are alike in all else that was tried. Repetitions are their mean, "
    "and a bar of one standard deviation to either side."
)

_MEAN = "The thick line is the mean of the thin ones that have every value."


def mean_line(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of those lines that have every value; of others a mean would jump with what was tried where."""
    values = sorted({value for pairs in lines for value, _ in pairs})
    whole = [dict(pairs) for pairs in lines if len(pairs) == len(values)]
    return [(value, fmean(line[value] for line in whole)) for value in values if whole]


def _lines(
    groups: Sequence[Group], name: str, tried: Sequence[str], outcome: Outcome
) -> dict[str, list[tuple[float, float]]]:
    """(value, outcome) of the groups, by the settings that stay the same along a line."""
    short = short_names(tried)
    together = {other for family in MOVE_TOGETHER if name in family for other in family} | {name}
    lines: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        record, value = group.records[0], _numbers(group).get(name)
        if value is None or not matters(record, name):
            continue
        same = [other for other in tried if other not in together and matters(record, other)]
        label = ", ".join(f"{short[other]} {setting_text(record.settings.get(other))}" for other in same)
        lines.setdefault(label or "all runs", []).append((value, outcome.of(group)))
    return lines


def _scale(axes: Any, values: Sequence[float]) -> None:
    distinct = sorted(set(values))
    if distinct[0] > 0 and distinct[-1] >= WIDE * distinct[0]:
        log_axis(axes, "x", distinct)
    if len(distinct) <= MOST_TICKS:
        place_ticks(axes, distinct)
