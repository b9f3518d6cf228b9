"""Scores of mechanisms whose epsilon is known exactly."""

from __future__ import annotations

import numpy as np

from discreet.audit.canary_scores import CanaryScores, RepeatedScores


def gaussian_scores(generator: np.random.Generator, *, canaries: int, noise: float) -> CanaryScores:
    """Orthogonal canaries of length 1 in one Gaussian release: the shift is 1 / noise."""
    included = generator.random(canaries) < 0.5
    return CanaryScores(included + noise * generator.normal(size=canaries), included)


def randomised_responses(generator: np.random.Generator, *, canaries: int, epsilon: float) -> CanaryScores:
    """Every coin told truly with probability e^epsilon / (1 + e^epsilon): exactly (epsilon, 0)-DP."""
    included = generator.random(canaries) < 0.5
    told = included ^ (generator.random(canaries) < 1 / (1 + np.exp(epsilon)))
    # The auditor's guesses at the ends of the order are all told truly with the same probability.
    return CanaryScores(np.where(told, 1.0, -1.0) + 0.1 * generator.random(canaries), included)


def repeated_gaussians(generator: np.random.Generator, *, runs: int, noise: float) -> RepeatedScores:
    """One canary of length 1 in many Gaussian releases."""
    return RepeatedScores(1 + noise * generator.normal(size=runs), noise * generator.normal(size=runs))
