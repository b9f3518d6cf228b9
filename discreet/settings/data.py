"""The data of clients, the inputs' normaliser, and the statistics that clients are asked for."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from discreet.accounting.events import poisson_round_event
from discreet.settings.ranges import (
    FINITE,
    POSITIVE,
    Count,
    CountOrZero,
    Finite,
    Positive,
    Text,
    different,
    list_of,
    one_of,
)
from discreet.settings.rules import require, section

if TYPE_CHECKING:
    from dp_accounting import DpEvent

STATISTICS = ("moments", "quantiles", "targets", "examples")


@section("data.")
class DataConfig:
    """The data set, and how it is dealt to the clients; the same value always deals the same."""

    name: Text = "digits"
    path: Text | None = None
    num_clients: Count = 200
    partition: Annotated[str, one_of("iid", "dirichlet", "shards", "natural", "sampled")] = "iid"
    alpha: Positive = 0.5
    partition_seed: CountOrZero = 20611
    examples_per_client: Count | None = None
    public_num_examples: Count | None = None
    normalise: Annotated[str, one_of("none", "public", "private")] = "none"

    def __post_init__(self) -> None:
        sampled, count = self.partition == "sampled", self.examples_per_client
        rule = "given with data.partition=sampled"
        require(not sampled or count is not None, "data.examples_per_client", rule, None)
        rule = "sampled with data.examples_per_client"
        require(sampled or count is None, "data.partition", rule, self.partition)


@section("normaliser.")
class NormaliserConfig:
    """The normaliser of inputs with `data.normalise`: (input - mean) / deviation, for each column of a table or
    channel of images. Public: constants, by default the middle and half of the public range. Private: left out, since
    a query finds them before the first round; a run that goes on has them."""

    means: Annotated[list[float], list_of(FINITE, "column")] | None = None
    deviations: Annotated[list[float], list_of(POSITIVE, "column")] | None = None

    def __post_init__(self) -> None:
        same = len(self.means or []) == len(self.deviations or [])
        require(same, "normaliser.deviations", "as many as normaliser.means", self.deviations)


@section("statistics.")
class StatisticsConfig:
    """The questions about clients' data, by `discreet statistics` and with `data.normalise=private`.

    Attributes:
      of: by `discreet statistics`.
      noise_multiplier: of the noise on the sum of all answers, over what one client can add to it.
      low, high: the public range of all inputs as a model reads them; None for that of the data set.
      most_examples: a client with more examples counts as one with so many.
      only: ask and end, without a round: what `discreet statistics` does, over Flower.
    """

    of: Annotated[list[str], different(*STATISTICS)] = field(default_factory=lambda: ["moments", "targets"])
    noise_multiplier: Positive = 10.0
    low: Finite | None = None
    high: Finite | None = None
    most_examples: Count = 1000
    only: bool = False

    def __post_init__(self) -> None:
        given = self.low is not None and self.high is not None
        holds = POSITIVE.holds(self.high - self.low) if given else self.low is self.high  # type: ignore[operator]
        rule = f"given with statistics.low, and above it by a number {POSITIVE.words}"
        require(holds, "statistics.high", rule, self.high)

    @property
    def event(self) -> DpEvent:
        """The event at user level of asking everybody once."""
        return poisson_round_event(1.0, noise_multiplier=self.noise_multiplier)
