"""The data of clients, the inputs' normaliser, and the statistics that clients are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from discreet.privacy.events import poisson_round_event
from discreet.settings.rules import FINITE, POSITIVE, Rule, at_least, check, list_of, one_of, require, setting

if TYPE_CHECKING:
    from dp_accounting import DpEvent

STATISTICS = ("moments", "quantiles", "targets", "examples")


def _are_names(value: object) -> bool:
    names = value if isinstance(value, list) else []
    return bool(names) and all(name in STATISTICS for name in names) and len(set(names)) == len(names)


NAMES = Rule(f"a list of different names of {', '.join(STATISTICS)}", _are_names)
NUMBERS, DEVIATIONS = list_of(FINITE, "column"), list_of(POSITIVE, "column")


@dataclass(frozen=True)
class DataConfig:
    """Which data set, and how it is dealt to the clients; the same value always deals the same."""

    name: str = "digits"
    path: str | None = None
    num_clients: int = setting(200, at_least(1))
    partition: str = setting("iid", one_of("iid", "dirichlet", "shards", "natural", "sampled"))
    alpha: float = setting(0.5, POSITIVE)
    partition_seed: int = setting(20611, at_least(0))
    examples_per_client: int | None = setting(None, at_least(1))
    public_num_examples: int | None = setting(None, at_least(1))
    normalise: str = setting("none", one_of("none", "public", "private"))

    def __post_init__(self) -> None:
        check(self, "data.")
        sampled, count = self.partition == "sampled", self.examples_per_client
        rule = "given with data.partition=sampled"
        require(not sampled or count is not None, "data.examples_per_client", rule, None)
        rule = "sampled with data.examples_per_client"
        require(sampled or count is None, "data.partition", rule, self.partition)


@dataclass(frozen=True)
class NormaliserConfig:
    """What inputs are normalised by with `data.normalise`: (input - mean) / deviation, for each column of a table or
    channel of images. Public: constants, by default the middle and half of the public range. Private: left out, since
    a query finds them before the first round; a run that goes on has them."""

    means: list[float] | None = field(default=None, metadata={"rule": NUMBERS})
    deviations: list[float] | None = field(default=None, metadata={"rule": DEVIATIONS})

    def __post_init__(self) -> None:
        check(self, "normaliser.")
        same = len(self.means or []) == len(self.deviations or [])
        require(same, "normaliser.deviations", "as many as normaliser.means", self.deviations)


@dataclass(frozen=True)
class StatisticsConfig:
    """What clients are asked of their data, by `discreet statistics` and with `data.normalise=private`.

    Attributes:
      of: by `discreet statistics`.
      noise_multiplier: of the noise on the sum of all answers, over what one client can add to it.
      low, high: the public range of all inputs as a model reads them; None for that of the data set.
      most_examples: a client with more examples counts as one with so many.
      only: ask and end, without a round: what `discreet statistics` does, over Flower.
    """

    of: list[str] = field(default_factory=lambda: ["moments", "targets"], metadata={"rule": NAMES})
    noise_multiplier: float = setting(10.0, POSITIVE)
    low: float | None = setting(None, FINITE)
    high: float | None = setting(None, FINITE)
    most_examples: int = setting(1000, at_least(1))
    only: bool = False

    def __post_init__(self) -> None:
        check(self, "statistics.")
        given = self.low is not None and self.high is not None
        holds = POSITIVE.holds(self.high - self.low) if given else self.low is self.high  # type: ignore[operator]
        rule = f"given with statistics.low, and above it by a number {POSITIVE.words}"
        require(holds, "statistics.high", rule, self.high)

    @property
    def event(self) -> DpEvent:
        """What it costs a client at user level if everybody is asked, once."""
        return poisson_round_event(1.0, noise_multiplier=self.noise_multiplier)
