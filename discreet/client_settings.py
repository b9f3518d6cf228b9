"""What a client needs to know of a run, and nothing else of it: these values travel, and check themselves on arrival.

The sections that a client reads are sections of the run's configuration (`discreet/settings.py`), with the same names
and ranges. What is wrong is said in one line that names the setting.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from discreet.privacy.accountants import ACCOUNTANTS, RDP
from discreet.privacy.events import fixed_size_round_event, poisson_round_event

if TYPE_CHECKING:
    from dp_accounting import DpEvent

USER, EXAMPLE, LOCAL = "user", "example", "local"
GUARANTEES = (USER, EXAMPLE, LOCAL)

PARTITIONS = ("iid", "dirichlet", "shards", "natural", "sampled")
SAMPLINGS = ("poisson", "fixed", "everyone")
NOISES = ("float", "grid", "secure_sum")
PRIVACY_DRAWS = {"float": 1, "secure_sum": 4}
LOCAL_KINDS = ("none", "gaussian", "laplace", "laplace_step")
SCHEDULES = ("uniform", "geometric")
LARGEST_RATE = 1e4  # of a learning rate: far beyond it a model overflows in its first round


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type, or out of its range. The message is one line that names it."""


def require(holds: bool, setting: str, rule: str, got: object) -> None:
    """Raises ConfigError unless a setting `holds` to its rule."""
    if not holds:
        raise ConfigError(f"{setting} must be {rule} (got {got})")


def one_of(value: str, setting: str, names: Sequence[str]) -> None:
    """A name that is known."""
    if value not in names:
        close = difflib.get_close_matches(value, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{setting} must be one of {', '.join(names)} (got {value}{hint})")


def positive(value: float, setting: str) -> None:
    """A finite number above 0."""
    require(math.isfinite(value) and value > 0, setting, "a finite number above 0", value)


def within(value: float, least: float, largest: float, setting: str) -> None:
    """A number of an interval."""
    require(least <= value <= largest, setting, f"within [{least:g}, {largest:g}]", value)


def rate(value: float, setting: str) -> None:
    """A learning rate."""
    require(0 < value <= LARGEST_RATE, setting, f"above 0 and at most {LARGEST_RATE:g}", value)


def at_least(value: float, least: float, setting: str) -> None:
    """A finite number that is not too small."""
    require(math.isfinite(value) and value >= least, setting, f"a finite number of at least {least}", value)


class Budgeted(Protocol):
    """A guarantee with a noise multiplier or a target for it, and a budget."""

    @property
    def enabled(self) -> bool: ...

    @property
    def noise_multiplier(self) -> float | None: ...

    @property
    def target_epsilon(self) -> float | None: ...


def _noise_or_target(noise_multiplier: float | None, target_epsilon: float | None, prefix: str) -> None:
    given = [value is not None for value in (noise_multiplier, target_epsilon)]
    names = f"{prefix}.noise_multiplier and {prefix}.target_epsilon"
    if all(given):
        raise ConfigError(f"{names} are both given: give one, the other follows from it")
    if not any(given):
        raise ConfigError(f"{names} are both missing: give one, the other follows from it")


def check_budget(section: Budgeted, prefix: str) -> None:
    """A guarantee that is on has a noise multiplier or a target, not both; what is given is within its range."""
    if section.noise_multiplier is not None:
        at_least(section.noise_multiplier, 0, f"{prefix}.noise_multiplier")
    for name in ("target_epsilon", "max_epsilon"):
        value = getattr(section, name)
        if value is not None:
            positive(value, f"{prefix}.{name}")
    if section.enabled:
        _noise_or_target(section.noise_multiplier, section.target_epsilon, prefix)


@dataclass(frozen=True)
class DataConfig:
    """Which data set, and how it is split over the clients."""

    name: str = "digits"
    path: str | None = None
    num_clients: int = 200
    partition: str = "iid"
    alpha: float = 0.5
    partition_seed: int = 20611
    examples_per_client: int | None = None
    public_num_examples: int | None = None

    def __post_init__(self) -> None:
        at_least(self.num_clients, 1, "data.num_clients")
        one_of(self.partition, "data.partition", PARTITIONS)
        positive(self.alpha, "data.alpha")
        at_least(self.partition_seed, 0, "data.partition_seed")
        if self.partition == "sampled":
            require(
                self.examples_per_client is not None,
                "data.examples_per_client",
                "given with data.partition=sampled",
                None,
            )
        if self.examples_per_client is not None:
            require(
                self.partition == "sampled", "data.partition", "sampled with data.examples_per_client", self.partition
            )
            at_least(self.examples_per_client, 1, "data.examples_per_client")
        if self.public_num_examples is not None:
            at_least(self.public_num_examples, 1, "data.public_num_examples")


@dataclass(frozen=True)
class TrainingConfig:
    """A client's local work."""

    epochs: int = 5
    batch_size: int = 8
    learning_rate: float = 0.2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        at_least(self.epochs, 1, "training.epochs")
        at_least(self.batch_size, 1, "training.batch_size")
        rate(self.learning_rate, "training.learning_rate")
        require(0 <= self.momentum < 1, "training.momentum", "within [0, 1)", self.momentum)


@dataclass(frozen=True)
class ExamplePrivacyConfig:
    """Example-level privacy: DP-SGD inside each client, for one example of it."""

    enabled: bool = False
    noise_multiplier: float | None = None
    l2_norm_clip: float = 1.0
    target_epsilon: float | None = None
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        positive(self.l2_norm_clip, "privacy.example.l2_norm_clip")
        check_budget(self, "privacy.example")


@dataclass(frozen=True)
class LocalPrivacyConfig:
    """Local privacy: each client noises its own update, for an untrusted server."""

    kind: str = "none"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    norm_clip: float = 1.0
    schedule: Any = "uniform"
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        prefix = "privacy.local"
        one_of(self.kind, f"{prefix}.kind", LOCAL_KINDS)
        positive(self.norm_clip, f"{prefix}.norm_clip")
        for name in ("epsilon", "noise_multiplier", "max_epsilon"):
            value = getattr(self, name)
            if value is not None:
                positive(value, f"{prefix}.{name}")
        if isinstance(self.schedule, str):
            one_of(self.schedule, f"{prefix}.schedule", SCHEDULES)
        else:
            shares = self.schedule if isinstance(self.schedule, list) else []
            numbers = [share for share in shares if isinstance(share, int | float) and share > 0]
            rule = "uniform, geometric, or a list of positive numbers, one a round"
            require(bool(shares) and len(numbers) == len(shares), f"{prefix}.schedule", rule, self.schedule)
        if self.kind != "none" and (self.epsilon is None) == (self.noise_multiplier is None):
            raise ConfigError(
                f"{prefix}.epsilon and {prefix}.noise_multiplier are both "
                f"{'missing' if self.epsilon is None else 'given'} with {prefix}.kind={self.kind}: give one, for "
                f"instance {prefix}.epsilon=8, the total over all rounds; privacy.user.enabled must be false"
            )


@dataclass(frozen=True)
class UserTerms:
    """User-level privacy as the server declares it: the client can check what is declared, not what the server does.

    Attributes:
      noise_multiplier: of a round; None if a target chooses it and it is not resolved yet.
      max_epsilon: the budget that ends the run, at the run's delta; None for none.
      sampling, probability, population_size: how cohorts are drawn.
    """

    enabled: bool = True
    noise_multiplier: float | None = None
    max_epsilon: float | None = None
    sampling: str = "poisson"
    probability: float = 1.0
    population_size: int = 1

    def __post_init__(self) -> None:
        one_of(self.sampling, "sampling.kind", SAMPLINGS)
        require(0 <= self.probability <= 1, "sampling.probability", "within (0, 1]", self.probability)
        at_least(self.population_size, 1, "sampling.population_size")

    def event(self, noise_multiplier: float) -> DpEvent:
        """What one round costs a client, for the sampling that is declared."""
        if self.sampling == "fixed":
            size, population = round(self.probability * self.population_size), self.population_size
            return fixed_size_round_event(size, population_size=population, noise_multiplier=noise_multiplier)
        return poisson_round_event(self.probability, noise_multiplier=noise_multiplier)


@dataclass(frozen=True)
class ClientSettings:
    """What a run asks of each client, the same in every round, and the guarantees under which it asks.

    Attributes:
      model: its name.
      delta, accountant: how epsilons are computed.
      noise: how noise is drawn, one of `NOISES`.

    Raises:
      ConfigError: a setting is out of range, or two settings contradict each other.
    """

    rounds: int
    model: str
    delta: float
    accountant: str
    noise: str
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    user: UserTerms = field(default_factory=UserTerms)
    example: ExamplePrivacyConfig = field(default_factory=ExamplePrivacyConfig)
    local: LocalPrivacyConfig = field(default_factory=LocalPrivacyConfig)

    def __post_init__(self) -> None:
        at_least(self.rounds, 1, "rounds")
        require(0 < self.delta < 1, "privacy.delta", "within (0, 1)", self.delta)
        one_of(self.accountant, "privacy.accountant", ACCOUNTANTS)
        one_of(self.noise, "privacy.noise", NOISES)
        require(self.data.path is None, "data.path", "left out: where data lie is not the server's to say", "a path")
        self._check_delta()
        self._check_local()
        if self.user.sampling == "fixed" and self.user.enabled:
            rule = f"{RDP} with sampling.kind=fixed"
            require(self.accountant == RDP, "privacy.accountant", rule, self.accountant)

    @property
    def accounts_itself(self) -> bool:
        """Whether a guarantee is on that each client accounts in a ledger of its own."""
        return self.example.enabled or self.local.kind != "none"

    def _check_delta(self) -> None:
        bound = 1 / self.user.population_size
        if self.user.enabled or self.local.kind in ("gaussian", "laplace"):
            proposed = 10.0 ** (math.ceil(math.log10(bound) - 1e-9) - 1)
            rule = f"below 1 / population_size = {bound:g}, for instance {proposed:g}"
            require(self.delta < bound, "privacy.delta", rule, self.delta)
        least, declared = self.training.batch_size, self.data.public_num_examples
        if self.example.enabled and declared is not None:
            rule = f"at least training.batch_size and below 1 / privacy.delta: within [{least}, {1 / self.delta:g})"
            require(least <= declared < 1 / self.delta, "data.public_num_examples", rule, declared)

    def _check_local(self) -> None:
        kind, schedule = self.local.kind, self.local.schedule
        if kind != "none" and self.user.enabled:
            raise ConfigError(
                f"privacy.local.kind={kind} needs privacy.user.enabled=false: the server's clip would cut the noise"
            )
        if kind == "laplace_step":
            require(not self.example.enabled, "privacy.example.enabled", "false with laplace_step", True)
            rule = "1 with laplace_step: its sensitivity 2 * eta * C / n holds for a single full-batch step"
            require(self.training.epochs == 1, "training.epochs", rule, self.training.epochs)
        if kind != "none" and isinstance(schedule, list):
            rule = f"a list of {self.rounds} numbers, one a round"
            require(len(schedule) == self.rounds, "privacy.local.schedule", rule, f"{len(schedule)} numbers")
