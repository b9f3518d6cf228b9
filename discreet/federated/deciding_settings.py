"""The settings that decide what a release costs: a run that is resumed must have the same."""

from __future__ import annotations

from operator import attrgetter

from discreet.federated.guarantees import count_stddev
from discreet.settings.run_config import RunConfig

_DECIDING = (
    *("privacy.delta", "privacy.noise", "privacy.user.enabled", "sampling.kind", "seed"),
    *("data.name", "data.num_clients", "data.partition", "data.alpha", "data.partition_seed"),
)
_DECIDING_USER = ("privacy.user.noise_multiplier", "privacy.user.clip.kind")
_DECIDING_SECURE = (
    *("privacy.user.aggregation", "privacy.example.aggregation"),
    *("privacy.secure.dropouts", "privacy.secure.colluding"),
)
_DECIDING_SHARED_STEP = ("training.batch_size",)
_DECIDING_EXAMPLE = (
    *("privacy.example.noise_multiplier", "privacy.example.target_epsilon", "privacy.example.clip_norm"),
    "data.public_num_examples",
)
_DECIDING_EVALUATION = tuple(
    f"evaluation.{name}" for name in ("kind", "every", "cohort", "share", "metrics", "noise_multiplier")
)
_DECIDING_STATISTICS = ("data.normalise", "statistics.noise_multiplier")
_DECIDING_LOCAL = tuple(f"privacy.local.{name}" for name in ("kind", "epsilon", "noise_multiplier", "clip_norm"))


def deciding_settings(config: RunConfig) -> dict[str, object]:
    """What decides the cost of a release, flat: a resumed run must have the same. Needs a resolved configuration."""
    names = [*_DECIDING]
    names += _DECIDING_USER if config.privacy.user.enabled else ()
    names += _DECIDING_SECURE if config.privacy.masked else ()
    names += _DECIDING_SHARED_STEP if config.privacy.example.secure else ()
    names += _DECIDING_EXAMPLE if config.privacy.example.enabled else ()
    names += _DECIDING_LOCAL if config.privacy.local.kind != "none" else ()
    names += _DECIDING_EVALUATION if config.evaluation.private else ()
    names += _DECIDING_STATISTICS if config.data.normalise == "private" else ()
    names += ("data.examples_per_client",) if config.data.examples_per_client is not None else ()
    facts: dict[str, object] = {name: attrgetter(name)(config) for name in names}
    if config.privacy.masked:
        facts["privacy.secure.threshold"] = config.privacy.secure.threshold_of(config.population_size)
    facts["sampling.probability"] = config.sampling_probability
    facts["sampling.population_size"] = config.population_size
    if config.privacy.user.enabled:
        facts["privacy.user.clip.count_stddev"] = count_stddev(config)
    if config.privacy.user.account is not None:
        facts["sampling.population_name"] = config.sampling.population_name
    return facts
