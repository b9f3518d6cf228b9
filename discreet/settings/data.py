"""The data of clients, the inputs' normaliser, and the questions to clients: statistics, and
ratings of the model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from discreet.accounting.events import poisson_round_event
from discreet.settings import rules
from discreet.settings.rules import require, section

if TYPE_CHECKING:
    from dp_accounting import DpEvent

STATISTICS = ("moments", "quantiles", "targets", "examples")
FOLDER = "folder"  # the name of data that a folder describes
SITE = "site"
PARTITIONS = ("iid", "dirichlet", "shards", "natural", "owners", SITE, "sampled")
# The queries about a model: `discreet.queries.answers` gives the kinds of target that each
# supports.
METRICS = ("accuracy", "loss", "auc", "calibration", "clients", "mae", "rmse", "r2")
# Means over a client's examples of vectors whose norm is bounded by a constant: one of m examples
# moves a mean by a share of 1 / m.
MEANS = ("accuracy", "loss", "auc", "calibration", "mae", "rmse")


def own_metrics(names: Iterable[str]) -> list[str]:
    """Those of the names that are functions of one's own, `package.module:function`."""
    return [name for name in names if ":" in name]


METRICS_RULE = rules.different(*METRICS, own="package.module:function")


@section("data.")
class DataConfig:
    """The data set, and its partition among the clients. Equal settings always give an equal
    partition."""

    name: rules.Text = "digits"
    path: rules.Text | None = None
    num_clients: rules.Count = 200
    partition: Annotated[str, rules.one_of(*PARTITIONS)] = "iid"
    alpha: rules.Positive = 0.5
    site: rules.Text | None = None
    partition_seed: rules.CountOrZero = 20611
    examples_per_client: rules.Count | None = None
    public_num_examples: rules.Count | None = None
    normalise: Annotated[str, rules.one_of("none", "public", "spread", "private")] = "none"
    agreed: list[str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        sampled = self.partition == "sampled"
        count = self.examples_per_client
        rule = "given with data.partition=sampled"
        require(not sampled or count is not None, "data.examples_per_client", rule, None)
        by_site = self.partition == SITE
        rule = f"given with data.partition={SITE}: the column whose values are the clients"
        require(not by_site or self.site is not None, "data.site", rule, None)
        rule = f"{SITE} with data.site"
        require(by_site or self.site is None, "data.partition", rule, self.partition)
        rule = "sampled with data.examples_per_client"
        require(sampled or count is None, "data.partition", rule, self.partition)


@section("normaliser.")
class NormaliserConfig:
    """The normaliser of inputs, for each column of a table or channel of images: (input - mean) /
    deviation."""

    means: Annotated[list[float], rules.list_of(rules.FINITE, "column")] | None = None
    deviations: Annotated[list[float], rules.list_of(rules.POSITIVE, "column")] | None = None

    def __post_init__(self) -> None:
        same = len(self.means or []) == len(self.deviations or [])
        require(same, "normaliser.deviations", "as many as normaliser.means", self.deviations)


@section("statistics.")
class StatisticsConfig:
    """The questions about clients' data, for `discreet statistics` and `data.normalise=private`."""

    of: Annotated[list[str], rules.different(*STATISTICS)] = field(
        default_factory=lambda: ["moments", "targets"]
    )
    noise_multiplier: rules.Positive = 10.0
    low: rules.Finite | None = None
    high: rules.Finite | None = None
    most_examples: rules.Count = 1000
    only: bool = False

    def __post_init__(self) -> None:
        given = self.low is not None and self.high is not None
        holds = rules.POSITIVE.holds(self.high - self.low) if given else self.low is self.high  # type: ignore[operator]
        rule = f"given with statistics.low, and above it by a number {rules.POSITIVE.words}"
        require(holds, "statistics.high", rule, self.high)

    @property
    def event(self) -> DpEvent:
        """The user-level event of asking every client once."""
        return poisson_round_event(1.0, noise_multiplier=self.noise_multiplier)


@section("evaluation.")
class EvaluationConfig:
    """Ratings of the model: on the server's public test set, by clients on their own held-out data,
    or none."""

    kind: Annotated[str, rules.one_of("public", "private", "none")] = "public"
    every: rules.Count = 10
    cohort: Annotated[str, rules.one_of("own", "same")] = "own"
    share: rules.OpenShare = 0.2
    metrics: Annotated[list[str], METRICS_RULE] = field(default_factory=lambda: ["accuracy"])
    noise_multiplier: rules.Positive = 10.0
    keep: Annotated[str, rules.one_of("last", "best")] | None = None  # the server's own

    def __post_init__(self) -> None:
        rule = f"last with evaluation.kind={self.kind}: only a public rating chooses at no cost"
        require(self.keep != "best" or self.kind == "public", "evaluation.keep", rule, self.keep)

    @cached_property
    def private(self) -> bool:
        """True if clients rate the model."""
        return self.kind == "private"

    @cached_property
    def rating_rounds(self) -> range:
        """The rounds whose cohort also rates the model that it starts from."""
        if self.private and self.cohort == "same":
            return range(self.every + 1, sys.maxsize, self.every)
        return range(0)

    def ratings(self, rounds: int) -> tuple[int, int]:
        """The numbers of ratings in so many rounds: by cohorts that also train, and by separate
        cohorts."""
        if self.private:
            times = -(-rounds // self.every)
        else:
            times = 0
        if self.cohort == "own":
            return (0, times)
        return (max(0, times - 1), min(times, 1))
