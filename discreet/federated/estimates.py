"""What the server reads from the noised sum of a cohort's answers to a query: numbers, each with its standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from discreet.federated.query import ACCURACY_SCALE, Accuracy, Query


@dataclass(frozen=True)
class Estimate:
    """A number that was read from a noised sum. `standard_error`: of the noise alone, in the units of `value`."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Sums:
    """A noised sum of answers, (length,), with the public constants that it is read by.

    Attributes:
      expected_cohort: q * population_size: what the sum is divided by, whoever has answered.
      stddev: of the noise on each coordinate.
    """

    values: Sequence[float]
    expected_cohort: float
    stddev: float


def names_of(query: Query) -> tuple[str, ...]:
    """The names of the estimates of a query."""
    zeros = Sums([0.0] * query.length, expected_cohort=1.0, stddev=1.0)
    return tuple(read(query, zeros))


def read(query: Query, sums: Sums) -> dict[str, Estimate]:
    """The estimates of a query, by name.

    `accuracy`: the mean over clients of the share that is right: 1/2 + sum / (2 * q * population_size), of the clients
    of the cohort. It is not clamped to [0, 1], for a clamped estimate would be biased.

    >>> read(Accuracy("classes"), Sums([600.0], expected_cohort=1200.0, stddev=10.0))
    {'accuracy': Estimate(value=0.75, standard_error=0.004166666666666667)}
    """
    assert isinstance(query, Accuracy)
    scale = ACCURACY_SCALE * sums.expected_cohort
    return {"accuracy": Estimate(0.5 + sums.values[0] / scale, sums.stddev / scale)}
