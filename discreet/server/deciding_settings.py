"""The settings that decide what a release costs: a run that is resumed must have the same."""

from __future__ import annotations

from operator import attrgetter

from discreet.server.guarantees import mechanisms_of
from discreet.settings.run_config import RunConfig

ALWAYS = (
    *("privacy.delta", "privacy.noise", "privacy.user.enabled", "sampling.kind", "seed"),
    *("data.name", "data.num_clients", "data.partition", "data.alpha", "data.partition_seed"),
)
OF_RATINGS = tuple(f"evaluation.{name}" for name in ("kind", "every", "cohort", "share", "metrics", "noise_multiplier"))
OF_DATA = ("data.normalise", "statistics.noise_multiplier")


def deciding_settings(config: RunConfig) -> dict[str, object]:
    """The settings that decide the cost of a release, flat. A resumed run must have the same ones."""
    mechanisms = mechanisms_of(config).values()
    names = [*ALWAYS, *(name for each in mechanisms for name in each.deciding)]
    names += ("privacy.user.mechanism",) if config.privacy.user.mechanism is not None else ()
    names += OF_RATINGS if config.evaluation.private else ()
    names += OF_DATA if config.data.normalise == "private" else ()
    names += ("data.examples_per_client",) if config.data.examples_per_client is not None else ()
    facts: dict[str, object] = {name: attrgetter(name)(config) for name in names}
    facts["sampling.probability"] = config.sampling_probability
    facts["sampling.population_size"] = config.population_size
    for each in mechanisms:
        facts |= each.decided
    if config.privacy.user.account is not None:
        facts["sampling.population_name"] = config.sampling.population_name
    return facts
