"""Ratings by clients of the models of runs: each number over the rounds with its standard errors, and its price."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent

from discreet.config import RunConfig
from discreet.federated.guarantees import EXAMPLE, LOCAL, USER, user_releases
from discreet.privacy.accounting import Entries, epsilon_spent
from discreet.reporting.records import RunRecord
from discreet.reporting.table import Table
from discreet.tasks.scores import Rated, rated_in

COLUMNS = ("round", "number", "value", "standard error", "standard error by noise alone")


@dataclass(frozen=True)
class Point:
    """A rating of the model after a round."""

    round: int
    rated: Rated


def points_of(record: RunRecord) -> list[Point]:
    """Every number of every rating, round after round."""
    return [Point(int(row["round"] or 0), each) for row in record.rounds for each in rated_in(row)]


def names_in(records: Sequence[RunRecord]) -> list[str]:
    """The names of the numbers that clients gave in these runs, each once."""
    return list(dict.fromkeys(point.rated.name for record in records for point in points_of(record)))


def known_points(record: RunRecord, name: str) -> list[Point]:
    """The ratings by a number, without those that noise has left nothing of."""
    return [point for point in points_of(record) if point.rated.name == name and point.rated.known]


def ratings_table(record: RunRecord) -> Table | None:
    """Every rating of a run with its standard errors; None if clients rated nothing."""
    rows = tuple(_row(point) for point in points_of(record))
    return Table(COLUMNS, rows) if rows else None


def _row(point: Point) -> tuple[str, ...]:
    rated = point.rated
    if not rated.known:
        return (str(point.round), rated.name, "not known: the noise leaves nothing to read", "", "")
    noise = "" if rated.by_noise is None else f"{rated.by_noise:.4f}"
    return (str(point.round), rated.name, f"{rated.value:.4f}", f"{rated.error:.4f}", noise)


def ratings_cost(record: RunRecord) -> Iterator[str]:
    """The price of the ratings of a run, in sentences: epsilons by the run's own accountant at its delta."""
    privacy, times = record.config.privacy, len({point.round for point in points_of(record)})
    ratings = f"{times} rating{'s' if times > 1 else ''}"
    how = f"by {privacy.accountant} at delta {privacy.delta:g}"
    if privacy.user.enabled:
        without = _without_ratings(record.config, len(record.rounds))
        yield f"{USER}-level: epsilon {record.epsilon(USER):.4g} with {ratings}, {without:.4g} without, {how}."
    for guarantee in (EXAMPLE, LOCAL):
        if math.isfinite(record.epsilon(guarantee)):
            alone = _epsilon([(own_answer_event(record.config), times)], record.config)
            yield (
                f"{guarantee}-level: epsilon {record.epsilon(guarantee):.4g} of the client that has spent most; its "
                f"answers to {ratings}, if it gave them all, cost {alone:.4g} alone, {how}."
            )


def own_answer_event(config: RunConfig) -> DpEvent:
    """The event of one answer of a client that noises its answers itself."""
    noise = config.evaluation.noise_multiplier
    return LaplaceDpEvent(noise) if config.privacy.local.kind == "laplace" else GaussianDpEvent(noise)


def _without_ratings(config: RunConfig, rounds: int) -> float:
    noise = config.privacy.user.noise_multiplier
    assert noise is not None
    unrated = replace(config, rounds=rounds, evaluation=replace(config.evaluation, kind="none"))
    return _epsilon(user_releases(unrated, noise), config)


def _epsilon(entries: Entries, config: RunConfig) -> float:
    return epsilon_spent(entries, delta=config.privacy.delta, accountant=config.privacy.accountant)
