"""The settings of a run, including the server's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field, replace
from functools import partial
from typing import Annotated, Any

from discreet.logs import LOG_FORMATS
from discreet.settings import rules
from discreet.settings.client_settings import ClientSettings, UserTerms, require_each
from discreet.settings.data import DataConfig, EvaluationConfig, NormaliserConfig, StatisticsConfig
from discreet.settings.own_numbers import OwnNumbers
from discreet.settings.privacy import PLAIN, PrivacyConfig
from discreet.settings.rules import check_all, check_value, require, section
from discreet.settings.training import FLOWER_APP, HF, ModelConfig, TaskConfig, TrainingConfig
from discreet.settings.wording import Key, Wording

# The settings of each of the server's optimizers.
_ADAPTIVE = ("learning_rate", "beta_1", "beta_2", "tau")
OPTIMIZERS = {
    "sgd": ("learning_rate", "momentum", "shrink_with_noise"),
    "adam": _ADAPTIVE,
    "yogi": _ADAPTIVE,
}
OPTIMIZER = rules.Rule(
    f"one of {', '.join(OPTIMIZERS)}, or one of your own as package.module:Class",
    lambda value: value in OPTIMIZERS or ":" in value,
    tuple(OPTIMIZERS),
)
ACCOUNT = {
    "privacy.user.enabled": (True, "its account is for the user level"),
    "privacy.user.aggregation": (PLAIN, "its account is for adding or removing a client"),
    "seed": (None, "noise that can be drawn again protects nobody"),
}


@section("sampling.")
class SamplingConfig:
    """The sampling of a round's cohort."""

    kind: rules.Sampling = "poisson"
    probability: rules.Probability = 0.3
    population_size: rules.Count | None = None
    groups: rules.Count | None = None
    population_name: Annotated[rules.Text, rules.Rule("a name", str.strip)] | None = None
    min_nodes: rules.Count = 1


@section("server.")
class ServerConfig:
    """The server's optimizer (None: the optimizer's default for a number; `numbers`: the fields of
    one from outside), and the seconds that the server waits for a round's replies."""

    optimizer: Annotated[str, OPTIMIZER] = "sgd"
    numbers: OwnNumbers | None = field(default=None, hash=False)
    learning_rate: rules.LearningRate | None = None
    momentum: rules.Momentum | None = None
    beta_1: rules.Momentum | None = None
    beta_2: rules.Momentum | None = None
    tau: rules.Positive | None = None
    shrink_with_noise: bool = False
    round_timeout: rules.Positive = 600.0

    def __post_init__(self) -> None:
        used = OPTIMIZERS.get(self.optimizer, ("numbers",))
        known = {name for names in OPTIMIZERS.values() for name in names} | {"numbers"}
        for name in sorted(known.difference(used)):
            value = getattr(self, name)
            given = value is not None and value is not False
            require(
                not given,
                f"server.{name}",
                f"omitted with server.optimizer={self.optimizer}",
                value,
            )


@section("operations.")
class OperationsConfig:
    """The monitoring of a running server, and the files at the end of a run. These settings do not
    affect privacy."""

    log_format: Annotated[str, rules.one_of(*LOG_FORMATS)] = "text"
    predictions: bool = False


@section("ray.")
class RayConfig:
    """The Ray cluster that trains clients with `engine=ray`. These settings affect neither privacy
    nor the results of a seed."""

    address: Annotated[str, rules.Rule("auto or host:port of a cluster's head", bool)] | None = None
    num_gpus: Annotated[float, rules.within(0, 1)] = 0.0


@section("")
class Settings:
    """One run of Discreet, checked as a whole. A setting out of range, or a contradiction, is a
    ConfigError."""

    rounds: rules.Rounds = 30
    seed: rules.Seed | None = None
    engine: Annotated[str, rules.one_of("auto", "batched", "sequential", "ray")] = "auto"
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    server: ServerConfig = ServerConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    normaliser: NormaliserConfig = NormaliserConfig()
    statistics: StatisticsConfig = StatisticsConfig()
    operations: OperationsConfig = OperationsConfig()
    ray: RayConfig = RayConfig()

    def __post_init__(self) -> None:
        checks = (_check_cohort, _check_account, _check_sums, _check_ratings, client_settings)
        check_all(*(partial(check, self) for check in checks))

    @property
    def population_size(self) -> int:
        """The number of clients: a public constant, never the number of clients that happen to be
        connected."""
        return self.sampling.population_size or self.data.num_clients

    @property
    def sampling_probability(self) -> float:
        """The probability that a client is in a round's cohort."""
        fixed = {"everyone": 1.0, "cyclic": 1 / (self.sampling.groups or 1)}
        return fixed.get(self.sampling.kind, self.sampling.probability)


def _check_cohort(config: Settings) -> None:
    groups = config.sampling.groups
    most = config.population_size
    there = config.data.num_clients
    least = Key("data.num_clients")
    rule = Wording("at least ", least, f" = {there}, the number of clients, or omitted")
    require(there <= most, "sampling.population_size", rule, most)
    turns = Key("sampling.kind=cyclic")
    if config.sampling.kind == "cyclic":
        rule = Wording("given with ", turns, f", within [1, {most}]")
        require(groups is not None and groups <= most, "sampling.groups", rule, groups)
    else:
        require(groups is None, "sampling.groups", Wording("omitted without ", turns), groups)
    if config.sampling.kind == "fixed":
        name = "sampling.probability * population_size, rounded,"
        check_value(
            round(config.sampling_probability * config.population_size), name, rules.at_least(1)
        )


def _check_account(config: Settings) -> None:
    if config.privacy.user.account is None:
        return
    account = Key("privacy.user.account")
    require_each(config, account, ACCOUNT)
    name = config.sampling.population_name
    rule = Wording("given with ", account, ": the population that the account belongs to")
    require(name is not None, "sampling.population_name", rule, name)


def _check_sums(config: Settings) -> None:
    """Raises ConfigError unless least squares have both their model and their loss."""
    sums = "least_squares"
    rule = Wording(f"{sums} with ", Key(f"model.name={sums}"), ", and with it alone")
    both = (config.model.name == sums) == (config.task.loss == sums)
    require(both, "task.loss", rule, config.task.loss)


def _check_ratings(config: Settings) -> None:
    """Raises ConfigError if clients would rate models on examples that others train on."""
    if config.evaluation.private:
        rule = (
            "another one with evaluation.kind=private: clients share examples, so "
            "other clients train on those that one holds out"
        )
        partition = config.data.partition
        require(partition != "sampled", "data.partition", rule, partition)


def with_any_noise(config: Settings) -> Settings:
    """The same settings for a question that is asked even if the noise would prevent learning."""
    user = replace(config.privacy.user, too_noisy="warn")
    return replace(config, privacy=replace(config.privacy, user=user))


def client_settings(config: Settings) -> ClientSettings:
    """The settings that clients receive, checked: without the folders, hosts and ports of the
    server."""
    privacy = config.privacy
    of_user = (
        "enabled",
        "noise_multiplier",
        "max_epsilon",
        "aggregation",
        "mechanism",
        "mechanism_numbers",
        "correlation",
    )
    user = UserTerms(
        sampling=config.sampling.kind,
        probability=config.sampling_probability,
        population_size=config.population_size,
        groups=config.sampling.groups or 1,
        adaptive=privacy.user.clip.kind == "adaptive",
        count_stddev=privacy.user.clip.count_stddev,
        **{name: getattr(privacy.user, name) for name in of_user},
    )
    # A node has the weights of a transformer in its own folder.
    if config.model.name.startswith(HF):
        model = replace(config.model, name=HF)
    else:
        model = config.model
    of_run = ("rounds", "task", "training", "normaliser", "statistics")
    of_privacy = ("delta", "accountant", "noise", "example", "local", "secure")
    asked: dict[str, Any] = {name: getattr(config, name) for name in of_run}
    asked |= {name: getattr(privacy, name) for name in of_privacy}
    asked["evaluation"] = replace(config.evaluation, keep=None)
    return ClientSettings(model=model, data=replace(config.data, path=None), user=user, **asked)


def described(config: Settings) -> dict[str, Any]:
    """The configuration as a nested dictionary. For another Flower app, settings that only its
    clients decide are omitted."""
    settings = asdict(config)
    if config.model.name == FLOWER_APP:
        del settings["training"]
        settings["data"] = {name: settings["data"][name] for name in ("name", "num_clients")}
    return settings


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found |= {f"{prefix}{key}": value}
    return found
