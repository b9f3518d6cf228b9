"""What the server reads from the noised sum of a cohort's answers to a query: numbers, each with its standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from discreet.federated.query import Query
from discreet.tasks.noised_answers import Estimate, Noise, RocPoint, read_metrics, roc_points


@dataclass(frozen=True)
class Sums:
    """A noised sum of answers, (length,), with the public constants that it is read by.

    Attributes:
      expected_cohort: q * population_size: what the sum is divided by, whoever has answered.
      stddev: of the noise on each coordinate.
      probability: q, with which a client is asked.
    """

    values: Sequence[float]
    expected_cohort: float
    stddev: float
    probability: float = 1.0

    @property
    def mean(self) -> Tensor:
        """The noised mean over clients, (length,), float64."""
        return torch.tensor(self.values, dtype=torch.float64) / self.expected_cohort

    @property
    def noise(self) -> Noise:
        """What is between the exact mean over the population and this one."""
        population = round(self.expected_cohort / self.probability)
        return Noise(self.stddev / self.expected_cohort, self.probability, population)


def names_of(query: Query) -> tuple[str, ...]:
    """The names of the estimates of a query about a model."""
    zeros = Sums([0.0] * query.length, expected_cohort=1.0, stddev=1.0)
    return tuple(read(query, zeros))


def read(query: Query, sums: Sums) -> dict[str, Estimate]:
    """The estimates of a query about a model, by name: see `discreet.tasks.noised_answers.read_metrics`."""
    return read_metrics(query.blocks, sums.mean, sums.noise, shape=query.shape)


def roc_of(query: Query, sums: Sums) -> list[RocPoint]:
    """The ROC curves of a model, if AUC is asked for: see `discreet.tasks.noised_answers.roc_points`."""
    return roc_points(query.blocks, sums.mean, sums.noise, shape=query.shape)
