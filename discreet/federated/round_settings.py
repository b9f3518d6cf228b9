"""From the configuration to the flat settings of the algorithm: where Hydra's tree ends."""

from __future__ import annotations

import math

from discreet.config import ConfigError, RunConfig
from discreet.federated.guarantees import PRIVACY_DRAWS, count_stddev, user_event
from discreet.federated.round import CohortSampling, RoundSettings, UserPrivacy


def round_settings(config: RunConfig) -> RoundSettings:
    """A round's public constants, of a configuration whose noise is resolved.

    Raises:
      ConfigError: the noise on the count is too small.
    """
    return RoundSettings(
        expected_cohort=expected_cohort(config),
        learning_rate=config.server.learning_rate,
        momentum=config.server.momentum,
        user=_user_privacy(config) if config.privacy.user.enabled else None,
        shrink_with_noise=config.server.shrink_with_noise,
    )


def expected_cohort(config: RunConfig) -> float:
    """The public denominator; of a fixed-size cohort its size."""
    return float(round(config.expected_cohort)) if config.sampling.kind == "fixed" else config.expected_cohort


def _user_privacy(config: RunConfig) -> UserPrivacy:
    user = config.privacy.user
    if user.noise_multiplier is None:
        raise ConfigError("privacy.user.noise_multiplier is not resolved")
    return UserPrivacy(
        noise_multiplier=user.noise_multiplier,
        event=user_event(config, user.noise_multiplier),
        count_stddev=count_stddev(config),
        target_quantile=user.clip.target_quantile,
        clip_learning_rate=user.clip.learning_rate,
        clip_max=user.clip.ceiling,
        draws=PRIVACY_DRAWS.get(config.privacy.noise, 1),
        on_grid=config.privacy.noise == "grid",
        largest_cohort=config.population_size,
    )


def cohort_sampling(config: RunConfig) -> CohortSampling:
    """How the cohorts of a configuration are drawn."""
    return CohortSampling(config.sampling.kind, config.sampling_probability, config.population_size)


def first_clip_norm(config: RunConfig) -> float:
    """C_0; infinity where user-level privacy is off and nothing is clipped at the server."""
    return config.privacy.user.clip.norm if config.privacy.user.enabled else math.inf
