"""Queries: what each client of a cohort answers with one vector. `discreet.federated.estimates` reads the noised sum.

A client's answer is a vector (length,) of L2 norm at most 1, whatever its data are, so that adding or removing one
client moves the sum by at most 1 (`discreet.tasks.answers`). The server clips each answer to that norm once
more, adds them up, adds Gaussian noise, and divides by public constants alone. At example level each client noises its
own answer (`discreet.client.release`). A client that is missing, or whose answer is malformed, adds zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import StatisticsConfig
from discreet.settings.rules import ConfigError
from discreet.tasks.answers import Block, DataShape, joined_answer, metric_blocks, statistic_blocks
from discreet.tasks.examples import TaskShape

EVALUATION = "evaluation"  # of a model, on what clients hold out
NORMALISE, STATISTICS = OF_DATA = ("normalise", "statistics")  # of their data, before the first round


@dataclass(frozen=True)
class Query:
    """What is asked, in blocks, of data of some shape."""

    blocks: tuple[Block, ...]
    shape: TaskShape

    @property
    def length(self) -> int:
        """How many numbers an answer has."""
        return sum(block.length for block in self.blocks)

    def answer(self, values: Tensor, targets: Tensor) -> Tensor:
        """A client's answer, (length,), float64, of L2 norm at most 1; zeros without examples. `values`: what the model
        gives for the examples that the client holds out, (n, k); `targets`: as `Examples` holds them."""
        return joined_answer(self.blocks, values, targets)


def query_of(name: str, run: ClientSettings, shape: TaskShape) -> Query:
    """The query of that name in a run on data of this shape.

    Raises:
      ConfigError: there is no such query, or a metric does not fit what is predicted.
    """
    if name in OF_DATA:
        names, data = ["moments"] if name == NORMALISE else run.statistics.of, shape_of_data(run.statistics, shape)
        return Query(statistic_blocks(names, data), shape)
    if name != EVALUATION:
        raise ConfigError(f"a query must be one of {EVALUATION}, {', '.join(OF_DATA)} (got {name})")
    try:
        return Query(metric_blocks(run.evaluation.metrics, shape), shape)
    except ValueError as error:
        raise ConfigError(f"evaluation.metrics {error}") from error


def shape_of_data(asked: StatisticsConfig, shape: TaskShape) -> DataShape:
    """What is public of the data that statistics are about.

    Raises:
      ConfigError: their range is not given, or statistics of such data are not known.
    """
    if asked.low is None or asked.high is None:
        raise ConfigError("statistics.low and statistics.high must be given: these data declare no range of inputs")
    try:
        return DataShape(shape, asked.low, asked.high, asked.most_examples)
    except ValueError as error:
        raise ConfigError(str(error)) from error
