"""The settings of a run: each with its type, its default and its range; a value checks itself once.

What is wrong is said in one line that names the setting. How they are composed and read: `discreet/config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from discreet.client_settings import (
    ClientSettings,
    ConfigError,
    DataConfig,
    ExamplePrivacyConfig,
    LocalPrivacyConfig,
    TrainingConfig,
    UserTerms,
    at_least,
    check_budget,
    one_of,
    positive,
    rate,
    require,
    within,
)
from discreet.logs import LOG_FORMATS
from discreet.privacy.accountants import PLD
from discreet.privacy.quantile import LARGEST_ESTIMATE, LEAST_ESTIMATE

CLIPS = ("adaptive", "fixed")
ENGINES = ("auto", "batched", "one_by_one")
CLIP_GROWTH = 10  # norms of updates that grow tenfold do not come from learning, or the first norm was a poor guess
TOO_NOISY = ("refuse", "warn")


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
        if self.population_size is not None:
            at_least(self.population_size, 1, "sampling.population_size")
        at_least(self.min_nodes, 1, "sampling.min_nodes")


@dataclass(frozen=True)
class ServerConfig:
    """The server's optimizer, and how long it waits for a round's replies (seconds)."""

    learning_rate: float = 1.0
    momentum: float = 0.8
    shrink_with_noise: bool = False
    round_timeout: float = 600.0

    def __post_init__(self) -> None:
        rate(self.learning_rate, "server.learning_rate")
        require(0 <= self.momentum < 1, "server.momentum", "within [0, 1)", self.momentum)
        positive(self.round_timeout, "server.round_timeout")


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
        one_of(self.kind, f"{prefix}.kind", CLIPS)
        within(self.norm, LEAST_ESTIMATE, LARGEST_ESTIMATE, f"{prefix}.norm")
        require(0 < self.target_quantile < 1, f"{prefix}.target_quantile", "within (0, 1)", self.target_quantile)
        rate(self.learning_rate, f"{prefix}.learning_rate")
        if self.count_stddev is not None:
            at_least(self.count_stddev, 0, f"{prefix}.count_stddev")
        if self.max is not None:
            within(self.max, self.norm, LARGEST_ESTIMATE, f"{prefix}.max")

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
        one_of(self.too_noisy, "privacy.user.too_noisy", TOO_NOISY)
        check_budget(self, "privacy.user")


@dataclass(frozen=True)
class PrivacyConfig:
    """The three guarantees, and how their epsilon is computed."""

    delta: float = 1e-3
    accountant: str = PLD
    noise: str = "grid"
    user: UserPrivacyConfig = field(default_factory=lambda: UserPrivacyConfig(target_epsilon=8.0))
    example: ExamplePrivacyConfig = field(default_factory=ExamplePrivacyConfig)
    local: LocalPrivacyConfig = field(default_factory=LocalPrivacyConfig)


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
        one_of(self.log_format, "operations.log_format", LOG_FORMATS)
        if self.metrics_port is not None:
            port = self.metrics_port
            require(1 <= port <= 65535, "operations.metrics_port", "within [1, 65535]", port)
        require(bool(self.metrics_host), "operations.metrics_host", "a host name or address", repr(self.metrics_host))


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
        if self.seed is not None:
            at_least(self.seed, 0, "seed")
        one_of(self.engine, "engine", ENGINES)
        require(not self.resume or self.output_dir is not None, "output_dir", "given with resume=true", None)
        _check_cohort(self)
        client_settings(self)

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
        at_least(round(config.expected_cohort), 1, "sampling.probability * population_size, rounded,")
    elif config.expected_cohort <= 0:
        raise ConfigError(
            f"sampling.probability must be above 0: {config.sampling.probability} of "
            f"{config.population_size} clients is an expected cohort of zero clients"
        )


def client_settings(config: RunConfig) -> ClientSettings:
    """What clients are told of a run, checked: all that `discreet.federated.messages` sends of a configuration.

    Where the server's own data lie is left out, as are the folders, hosts and ports of the server.
    """
    privacy = config.privacy
    user = UserTerms(
        enabled=privacy.user.enabled,
        noise_multiplier=privacy.user.noise_multiplier,
        max_epsilon=privacy.user.max_epsilon,
        sampling=config.sampling.kind,
        probability=config.sampling_probability,
        population_size=config.population_size,
    )
    return ClientSettings(
        rounds=config.rounds,
        model=config.model.name,
        delta=privacy.delta,
        accountant=privacy.accountant,
        noise=privacy.noise,
        data=replace(config.data, path=None),
        training=config.training,
        user=user,
        example=privacy.example,
        local=privacy.local,
    )
