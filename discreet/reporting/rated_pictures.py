"""Pictures of what clients said of models: each number over the rounds, with its standard errors as bands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from discreet.federated.roc_file import read_roc
from discreet.reporting.drawing import MUTED, REST, SERIES, Picture, canvas, draw_line, to_svg
from discreet.reporting.pictures import ColouredGroups, coloured, count_rounds, draw_group
from discreet.reporting.ratings import is_rated, known_points, names_in
from discreet.reporting.records import RunRecord
from discreet.tasks.roc import RocPoint

SHORT = ("auc", "mae", "rmse", "r2")
OVER_CLIENTS = "clients_"  # begins the names of numbers over clients: their mean and their quantiles
MOST_BANDS = 3  # settings on one picture that have bands: more would hide one another
BANDS = (("error", 0.15), ("by_noise", 0.3))  # the wider first
HOW_TO_READ = (
    "Dark band: one standard error by noise alone. Light band: one in all, with the chance of who is asked, which "
    "rests on a bound on how much clients differ."
)
CURVES = (
    "From the noised histograms of scores that AUC is read from, in steps of half a logit: it costs nothing more. A "
    "single curve has bars of one standard error in all. Of more than two classes each is against the rest."
)
OF_CLIENTS = (
    "Of each client's own accuracy, or mean absolute error in half ranges, the mean and quantiles over clients; the "
    "worst tenth is the value that a tenth of them do not reach (of errors: exceed)."
)


def rated_pictures(records: Sequence[RunRecord]) -> Iterator[Picture]:
    """A picture for each number that clients gave; of one run, those over clients share one."""
    runs = coloured([record for record in records if is_rated(record)]) if any(map(is_rated, records)) else None
    if runs is None:
        return
    names = names_in(records)
    together = [name for name in names if name.startswith(OVER_CLIENTS)] if len(records) == 1 else []
    for name in names:
        if name not in together:
            yield _over_rounds(runs, name)
    if together:
        yield _of_clients(records[0], together)
    if len(records) == 1:
        yield from _roc(records[0])


def _over_rounds(runs: ColouredGroups, name: str) -> Picture:
    words = in_words(name)
    title = f"{words[0].upper()}{words[1:]} after each rating, by clients"
    banded = not runs.repeated and len(runs.groups) <= MOST_BANDS
    with canvas() as (figure, (axes,)):
        for group in runs.groups:
            draw_group(axes, group, name, number=runs.number(group))
            if banded:
                draw_bands(axes, group.records[0], name, number=runs.number(group))
        axes.set_ylabel(f"{in_words(name)}, by clients")
        count_rounds(axes, runs)
        note = HOW_TO_READ if banded else ""
        return Picture(title, to_svg(figure, title), runs.legend, note, aside=name == "loss")


def _of_clients(record: RunRecord, names: Sequence[str]) -> Picture:
    title = "How clients fare, each by its own number"
    with canvas() as (figure, (axes,)):
        for number, name in enumerate(names):
            draw_line(axes, [(point.round, point.rated.value) for point in known_points(record, name)], number)
            draw_bands(axes, record, name, number=number)
        axes.set_ylabel("a client's own")
        axes.set_ylim(-0.02, 1.02)
        count_rounds(axes, coloured([record]))
        legend = tuple((number, in_words(name)) for number, name in enumerate(names))
        return Picture(title, to_svg(figure, title), legend, f"{OF_CLIENTS} {HOW_TO_READ}")


def _roc(record: RunRecord) -> Iterator[Picture]:
    """The ROC curves of the last rating; nothing if clients were not asked for AUC, or noise has left nothing of it."""
    points = read_roc(record.path)
    last = max((number for number, _ in points), default=0)
    curves: dict[str, list[RocPoint]] = {}
    for number, point in points:
        if number == last:
            curves.setdefault(point.of, []).append(point)
    if not curves:
        return
    title = f"ROC after round {last}, by clients"
    with canvas() as (figure, (axes,)):
        for place, curve in enumerate(curves.values()):
            number = place if place < len(SERIES) else REST
            draw_line(axes, [(point.false_positive_rate, point.true_positive_rate) for point in curve], number)
            if len(curves) == 1:
                _draw_crosses(axes, curve)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.7, linestyle="dashed", zorder=1)
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        legend = [(place, name) for place, name in enumerate(curves) if place < len(SERIES)]
        more = [(REST, f"{len(curves) - len(legend)} more, in grey")] if len(curves) > len(legend) else []
        yield Picture(title, to_svg(figure, title), (*legend, *more), CURVES)


def _draw_crosses(axes: Any, curve: Sequence[RocPoint]) -> None:
    across, up = [each.false_positive_rate for each in curve], [each.true_positive_rate for each in curve]
    errors = {"xerr": [each.false_positive_rate_error for each in curve]}
    errors |= {"yerr": [each.true_positive_rate_error for each in curve]}
    axes.errorbar(across, up, **errors, color=SERIES[0], linewidth=0.8, alpha=0.5, fmt="none")


def draw_bands(axes: Any, record: RunRecord, name: str, *, number: int) -> None:
    """One standard error to either side of a number, in all and by noise alone, in the colour of series `number`. Each
    rating has a line from end to end as well: the band of a single one has no width."""
    points = known_points(record, name)
    for of, strength in BANDS:
        errors = [(point.round, point.rated.value, getattr(point.rated, of)) for point in points]
        bars = [(place, value - error, value + error) for place, value, error in errors if error is not None]
        if bars:
            places, low, high = zip(*bars, strict=True)
            axes.fill_between(places, low, high, color=SERIES[number], alpha=strength, linewidth=0)
            axes.vlines(places, low, high, color=SERIES[number], alpha=2 * strength, linewidth=0.9)


def in_words(name: str) -> str:
    """A column's name as a picture says it.

    >>> in_words("clients_worst_tenth")
    'clients: worst tenth'
    >>> in_words("auc")
    'AUC'
    """
    if name in SHORT:
        return name.upper()
    return name.replace("_", ": ", 1).replace("_", " ") if name.startswith(OVER_CLIENTS) else name.replace("_", " ")
