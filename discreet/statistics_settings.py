"""What is asked of clients' data, and what inputs are normalised by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from discreet.privacy.events import poisson_round_event
from discreet.setting_checks import ConfigError, check, require, setting
from discreet.value_rules import FINITE, POSITIVE, Rule, at_least, list_of

if TYPE_CHECKING:
    from dp_accounting import DpEvent

STATISTICS = ("moments", "quantiles", "targets", "examples")


def _are_names(value: object) -> bool:
    names = value if isinstance(value, list) else []
    return bool(names) and all(name in STATISTICS for name in names) and len(set(names)) == len(names)


NAMES = Rule(f"a list of different names of {', '.join(STATISTICS)}", _are_names)
NUMBERS, DEVIATIONS = list_of(FINITE, "column"), list_of(POSITIVE, "column")


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


def check_paid(what: str, *, at_server: bool, secure: bool, sampling: str) -> None:
    """Raises ConfigError unless `what` clients are asked is noised at the server, for add or remove one client."""
    if not at_server:
        raise ConfigError(
            f"{what} needs privacy.user.enabled=true and privacy.example.enabled=false: noise at the server"
        )
    if secure:
        raise ConfigError(f"{what} needs privacy.user.aggregation=plain: the server would read each client's answer")
    if sampling == "fixed":
        raise ConfigError(f"{what} needs sampling.kind=poisson or everyone: its price is for add or remove one client")
