"""The settings of a run: each with its type, its default and its range; a value checks itself once.

What is wrong is said in one line that names the setting. How they are composed and read: `discreet/config.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from discreet.privacy.accountants import ACCOUNTANTS, PLD, RDP
from discreet.privacy.quantile import LARGEST_ESTIMATE, LEAST_ESTIMATE

PARTITIONS = ("iid", "dirichlet", "shards", "natural", "sampled")
SAMPLINGS = ("poisson", "fixed", "everyone")
CLIPS = ("adaptive", "fixed")
NOISES = ("float", "grid", "secure_sum")
LOCAL_KINDS = ("none", "gaussian", "laplace", "laplace_step")
SCHEDULES = ("uniform", "geometric")
ENGINES = ("auto", "batched", "one_by_one")
LOG_FORMATS = ("text", "json")
CLIP_GROWTH = 10  # norms of updates that grow tenfold do not come from learning, or the first norm was a poor guess
TOO_NOISY = ("refuse", "warn")
LARGEST_RATE = 1e4  # of a learning rate: far beyond it a model overflows in its first round


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type, or out of its range. The message is one line that names it."""


def _require(holds: bool, setting: str, rule: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{setting} must be {rule} (got {got})")


def _one_of(value: str, setting: str, names: Sequence[str]) -> None:
    if value not in names:
        close = difflib.get_close_matches(value, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{setting} must be one of {', '.join(names)} (got {value}{hint})")


def _positive(value: float, setting: str) -> None:
    _require(math.isfinite(value) and value > 0, setting, "a finite number above 0", value)


def _within(value: float, least: float, largest: float, setting: str) -> None:
    _require(least <= value <= largest, setting, f"within [{least:g}, {largest:g}]", value)


def _rate(value: float, setting: str) -> None:
    _require(0 < value <= LARGEST_RATE, setting, f"above 0 and at most {LARGEST_RATE:g}", value)


def _at_least(value: float, least: float, setting: str) -> None:
    _require(math.isfinite(value) and value >= least, setting, f"a finite number of at least {least}", value)


def _noise_or_target(noise_multiplier: float | None, target_epsilon: float | None, prefix: str) -> None:
    given = [value is not None for value in (noise_multiplier, target_epsilon)]
    names = f"{prefix}.noise_multiplier and {prefix}.target_epsilon"
    if all(given):
        raise ConfigError(f"{names} are both given: give one, the other follows from it")
    if not any(given):
        raise ConfigError(f"{names} are both missing: give one, the other follows from it")


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
        _at_least(self.num_clients, 1, "data.num_clients")
        _one_of(self.partition, "data.partition", PARTITIONS)
        _positive(self.alpha, "data.alpha")
        _at_least(self.partition_seed, 0, "data.partition_seed")
        if self.partition == "sampled":
            _require(
                self.examples_per_client is not None,
                "data.examples_per_client",
                "given with data.partition=sampled",
                None,
            )
        if self.examples_per_client is not None:
            _require(
                self.partition == "sampled", "data.partition", "sampled with data.examples_per_client", self.partition
            )
            _at_least(self.examples_per_client, 1, "data.examples_per_client")
        if self.public_num_examples is not None:
            _at_least(self.public_num_examples, 1, "data.public_num_examples")


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: str = "mlp"


@dataclass(frozen=True)
class SamplingConfig:
    """How a round's cohort is drawn. `population_size` is a public constant; by default `data.num_clients`, and never
    less: delta is held below one in all clients that exist."""

    kind: str = "poisson"
    probability: float = 0.3
    population_size: int | None = None
    min_nodes: int = 1

    def __post_init__(self) -> None:
        _one_of(self.kind, "sampling.kind", SAMPLINGS)
        _require(0 <= self.probability <= 1, "sampling.probability", "within (0, 1]", self.probability)
        if self.population_size is not None:
            _at_least(self.population_size, 1, "sampling.population_size")
        _at_least(self.min_nodes, 1, "sampling.min_nodes")


@dataclass(frozen=True)
class TrainingConfig:
    """A client's local work."""

    epochs: int = 5
    batch_size: int = 8
    learning_rate: float = 0.2
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _at_least(self.epochs, 1, "training.epochs")
        _at_least(self.batch_size, 1, "training.batch_size")
        _rate(self.learning_rate, "training.learning_rate")
        _require(0 <= self.momentum < 1, "training.momentum", "within [0, 1)", self.momentum)


@dataclass(frozen=True)
class ServerConfig:
    """The server's optimizer, and how long it waits for a round's replies (seconds)."""

    learning_rate: float = 1.0
    momentum: float = 0.8
    shrink_with_noise: bool = False
    round_timeout: float = 600.0

    def __post_init__(self) -> None:
        _rate(self.learning_rate, "server.learning_rate")
        _require(0 <= self.momentum < 1, "server.momentum", "within [0, 1)", self.momentum)
        _positive(self.round_timeout, "server.round_timeout")


@dataclass(frozen=True)
class ClipConfig:
    """The clip norm of client updates: tracking a quantile (Andrew et al. 2021), or fixed."""

    kind: str = "adaptive"
    norm: float = 0.3
    max: float | None = None
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_stddev: float | None = None

    def __post_init__(self) -> None:
        prefix = "privacy.user.clip"
        _one_of(self.kind, f"{prefix}.kind", CLIPS)
        _within(self.norm, LEAST_ESTIMATE, LARGEST_ESTIMATE, f"{prefix}.norm")
        _require(0 < self.target_quantile < 1, f"{prefix}.target_quantile", "within (0, 1)", self.target_quantile)
        _rate(self.learning_rate, f"{prefix}.learning_rate")
        if self.count_stddev is not None:
            _at_least(self.count_stddev, 0, f"{prefix}.count_stddev")
        if self.max is not None:
            _within(self.max, self.norm, LARGEST_ESTIMATE, f"{prefix}.max")

    @property
    def ceiling(self) -> float:
        """What an adaptive clip norm never passes: `max`, or `CLIP_GROWTH` times the first norm."""
        return min(CLIP_GROWTH * self.norm, LARGEST_ESTIMATE) if self.max is None else self.max


@dataclass(frozen=True)
class UserPrivacyConfig:
    """User-level privacy: noise at the server, for all data of one client."""

    enabled: bool = True
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    max_epsilon: float | None = None
    too_noisy: str = "refuse"
    clip: ClipConfig = field(default_factory=ClipConfig)

    def __post_init__(self) -> None:
        _one_of(self.too_noisy, "privacy.user.too_noisy", TOO_NOISY)
        _check_budget(self, "privacy.user")


@dataclass(frozen=True)
class ExamplePrivacyConfig:
    """Example-level privacy: DP-SGD inside each client, for one example of it."""

    enabled: bool = False
    noise_multiplier: float | None = None
    l2_norm_clip: float = 1.0
    target_epsilon: float | None = None
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        _positive(self.l2_norm_clip, "privacy.example.l2_norm_clip")
        _check_budget(self, "privacy.example")


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
        _one_of(self.kind, f"{prefix}.kind", LOCAL_KINDS)
        _positive(self.norm_clip, f"{prefix}.norm_clip")
        for name in ("epsilon", "noise_multiplier", "max_epsilon"):
            value = getattr(self, name)
            if value is not None:
                _positive(value, f"{prefix}.{name}")
        if isinstance(self.schedule, str):
            _one_of(self.schedule, f"{prefix}.schedule", SCHEDULES)
        else:
            shares = self.schedule if isinstance(self.schedule, list) else []
            numbers = [share for share in shares if isinstance(share, int | float) and share > 0]
            rule = "uniform, geometric, or a list of positive numbers, one a round"
            _require(bool(shares) and len(numbers) == len(shares), f"{prefix}.schedule", rule, self.schedule)
        if self.kind != "none" and (self.epsilon is None) == (self.noise_multiplier is None):
            raise ConfigError(
                f"{prefix}.epsilon and {prefix}.noise_multiplier are both "
                f"{'missing' if self.epsilon is None else 'given'} with {prefix}.kind={self.kind}: give one, for "
                f"instance {prefix}.epsilon=8, the total over all rounds; privacy.user.enabled must be false"
            )


def _check_budget(section: UserPrivacyConfig | ExamplePrivacyConfig, prefix: str) -> None:
    if section.noise_multiplier is not None:
        _at_least(section.noise_multiplier, 0, f"{prefix}.noise_multiplier")
    for name in ("target_epsilon", "max_epsilon"):
        value = getattr(section, name)
        if value is not None:
            _positive(value, f"{prefix}.{name}")
    if section.enabled:
        _noise_or_target(section.noise_multiplier, section.target_epsilon, prefix)


@dataclass(frozen=True)
class PrivacyConfig:
    """The three guarantees, and how their epsilon is computed."""

    delta: float = 1e-3
    accountant: str = PLD
    noise: str = "grid"
    user: UserPrivacyConfig = field(default_factory=lambda: UserPrivacyConfig(target_epsilon=8.0))
    example: ExamplePrivacyConfig = field(default_factory=ExamplePrivacyConfig)
    local: LocalPrivacyConfig = field(default_factory=LocalPrivacyConfig)

    def __post_init__(self) -> None:
        _require(0 < self.delta < 1, "privacy.delta", "within (0, 1)", self.delta)
        _one_of(self.accountant, "privacy.accountant", ACCOUNTANTS)
        _one_of(self.noise, "privacy.noise", NOISES)


@dataclass(frozen=True)
class OperationsConfig:
    """How a running server is watched, and what it writes when a run ends. Nothing here decides privacy.

    Attributes:
      predictions: write predictions.csv and indicators.json of the public test set when a run ends.
    """

    log_format: str = "text"
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    predictions: bool = False

    def __post_init__(self) -> None:
        _one_of(self.log_format, "operations.log_format", LOG_FORMATS)
        if self.metrics_port is not None:
            port = self.metrics_port
            _require(1 <= port <= 65535, "operations.metrics_port", "within [1, 65535]", port)
        _require(bool(self.metrics_host), "operations.metrics_host", "a host name or address", repr(self.metrics_host))


@dataclass(frozen=True)
class RunConfig:
    """One run of Discreet, checked as a whole.

    Raises:
      ConfigError: a setting is out of range, or two settings contradict each other.
    """

    rounds: int = 30
    seed: int | None = None
    device: str = "cpu"
    engine: str = "auto"
    output_dir: str | None = None
    resume: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)

    def __post_init__(self) -> None:
        _at_least(self.rounds, 1, "rounds")
        if self.seed is not None:
            _at_least(self.seed, 0, "seed")
        _one_of(self.engine, "engine", ENGINES)
        _require(not self.resume or self.output_dir is not None, "output_dir", "given with resume=true", None)
        _check_cohort(self)
        _check_guarantees(self)

    @property
    def population_size(self) -> int:
        """How many clients there are: a public constant, never the number that happen to be connected."""
        return self.sampling.population_size or self.data.num_clients

    @property
    def sampling_probability(self) -> float:
        """The chance that a client is in a round's cohort."""
        return 1.0 if self.sampling.kind == "everyone" else self.sampling.probability

    @property
    def expected_cohort(self) -> float:
        """q * population_size, the public denominator of a round's average."""
        return self.sampling_probability * self.population_size


def _check_cohort(config: RunConfig) -> None:
    if config.population_size < config.data.num_clients:
        raise ConfigError(
            f"sampling.population_size must be at least data.num_clients = {config.data.num_clients}, the clients that "
            f"there are (got {config.population_size}): leave it out, or set data.num_clients"
        )
    if config.sampling.kind == "fixed":
        _at_least(round(config.expected_cohort), 1, "sampling.probability * population_size, rounded,")
    elif config.expected_cohort <= 0:
        raise ConfigError(
            f"sampling.probability must be above 0: {config.sampling.probability} of "
            f"{config.population_size} clients is an expected cohort of zero clients"
        )


def _check_guarantees(config: RunConfig) -> None:
    privacy = config.privacy
    bound = 1 / config.population_size
    rule = f"below 1 / population_size = {bound:g}"
    local = privacy.local.kind
    if privacy.user.enabled or local in ("gaussian", "laplace"):
        proposed = 10.0 ** (math.ceil(math.log10(bound) - 1e-9) - 1)
        _require(privacy.delta < bound, "privacy.delta", f"{rule}, for instance {proposed:g}", privacy.delta)
    least, declared = config.training.batch_size, config.data.public_num_examples
    if privacy.example.enabled and declared is not None:
        rule = f"at least training.batch_size and below 1 / privacy.delta: within [{least}, {1 / privacy.delta:g})"
        _require(least <= declared < 1 / privacy.delta, "data.public_num_examples", rule, declared)
    if local != "none" and privacy.user.enabled:
        raise ConfigError(
            f"privacy.local.kind={local} needs privacy.user.enabled=false: the server's clip would cut the noise"
        )
    if local == "laplace_step":
        _require(not privacy.example.enabled, "privacy.example.enabled", "false with laplace_step", True)
        _require(
            config.training.epochs == 1,
            "training.epochs",
            "1 with laplace_step: its sensitivity 2 * eta * C / n holds for a single full-batch step",
            config.training.epochs,
        )
    schedule = privacy.local.schedule
    if local != "none" and isinstance(schedule, list):
        rule = f"a list of {config.rounds} numbers, one a round"
        _require(len(schedule) == config.rounds, "privacy.local.schedule", rule, f"{len(schedule)} numbers")
    if config.sampling.kind == "fixed" and privacy.user.enabled:
        _require(
            privacy.accountant == RDP,
            "privacy.accountant",
            f"{RDP} with sampling.kind=fixed",
            privacy.accountant,
        )
