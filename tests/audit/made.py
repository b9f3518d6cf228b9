"""Scores of mechanisms whose epsilon is known exactly, and a planted fault: noise of half its
size."""

from __future__ import annotations

import numpy as np
import pytest

from discreet.audit.canaries import Scores
from discreet.privacy import mechanisms


def gaussian_scores(generator: np.random.Generator, *, canaries: int, noise: float) -> Scores:
    """Orthogonal canaries of length 1 in one Gaussian release: the shift is 1 / noise."""
    included = generator.random(canaries) < 0.5
    return Scores(included + noise * generator.normal(size=canaries), included)


def randomised_responses(
    generator: np.random.Generator, *, canaries: int, epsilon: float
) -> Scores:
    """Every coin told truly with probability e^epsilon / (1 + e^epsilon): exactly (epsilon,
    0)-DP."""
    included = generator.random(canaries) < 0.5
    told = included ^ (generator.random(canaries) < 1 / (1 + np.exp(epsilon)))
    # The auditor's guesses at the ends of the order are all told truly with the same probability.
    return Scores(np.where(told, 1.0, -1.0) + 0.1 * generator.random(canaries), included)


def repeated_scores(seen: np.ndarray, unseen: np.ndarray) -> Scores:
    """Of one canary in many releases, with it and without."""
    return Scores(np.concatenate([seen, unseen]), np.arange(len(seen) + len(unseen)) < len(seen))


def repeated_gaussians(generator: np.random.Generator, *, runs: int, noise: float) -> Scores:
    """One canary of length 1 in many Gaussian releases."""
    return repeated_scores(
        1 + noise * generator.normal(size=runs), noise * generator.normal(size=runs)
    )


def halve_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on Gaussian and Laplace noise is half as large as it is said to be."""
    whole = mechanisms._noise_for
    monkeypatch.setattr(mechanisms, "_noise_for", lambda *given: whole(*given) / 2)
