"""Mechanisms of a run that is nothing but its noise."""

from __future__ import annotations

from typing import Any

from discreet.mechanisms.central_gaussian import CentralGaussian
from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.mechanisms.masked_sums import MaskedGaussian
from discreet.settings.client_settings import ClientSettings, UserTerms
from discreet.settings.clip_choice import CLIP
from discreet.settings.data import EvaluationConfig
from discreet.settings.privacy import CorrelationConfig, SecureConfig, Sizes


def run_of(
    z: float, *, count_stddev: float | None = None, noise: str = "grid", **user: Any
) -> ClientSettings:
    """A run with a noise multiplier; with a `count_stddev` its clip norm is adaptive."""
    user = {
        "population_size": 100,
        "adaptive": count_stddev is not None,
        "count_stddev": count_stddev,
        **user,
    }
    secure = user.get("aggregation") == "secure"
    # the noise on ratings, which the cohort of each round but the first one gives
    rated = user.pop("rated", 0.0)
    evaluation = (
        EvaluationConfig("private", 1, "same", noise_multiplier=rated)
        if rated
        else EvaluationConfig()
    )
    rounds, accountant = user.pop("rounds", 1), "rdp" if secure else "pld"
    losses = SecureConfig(dropouts=0 if user["population_size"] < 5 else 1)
    terms = UserTerms(True, z, **user)
    return ClientSettings(
        rounds, 1e-3, accountant, noise, user=terms, evaluation=evaluation, secure=losses
    )


def central(
    z: float, count_stddev: float | None = None, noise: str = "float", **user: Any
) -> CentralGaussian:
    return CentralGaussian(run_of(z, count_stddev=count_stddev, noise=noise, **user))


def turns(z: float, kind: str, bandwidth: int, *, groups: int, rounds: int) -> CorrelatedNoise:
    correlation = CorrelationConfig(kind, bandwidth if kind in ("bsr", "bisr") else None)
    how = {
        "sampling": "cyclic",
        "probability": 1 / groups,
        "groups": groups,
        "correlation": correlation,
    }
    return CorrelatedNoise(run_of(z, rounds=rounds, **how))


def masked(
    z: float, count_stddev: float | None = None, *, nodes: int, size: int, answers: int = 0
) -> MaskedGaussian:
    how = {
        "sampling": "everyone",
        "aggregation": "secure",
        "population_size": nodes,
        "rated": 2.5 if answers else 0.0,
    }
    return MaskedGaussian(
        run_of(z, count_stddev=count_stddev, **how), CLIP, Sizes(size, answers or 1)
    )
