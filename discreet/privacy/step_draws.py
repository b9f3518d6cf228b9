"""The random numbers of a step of DP-SGD, the same at a client, in a cohort and in a loop."""

from __future__ import annotations

from torch import Tensor

from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import poisson_sample


def step_batch(source: RandomSource, step: int, size: int, *, probability: float) -> Tensor:
    """The Poisson batch of a client in a step of DP-SGD: positions, ascending."""
    return poisson_sample(
        size, probability=probability, source=source.child("step", step).child("batch")
    )


def step_noise(source: RandomSource, step: int) -> RandomSource:
    return source.child("step", step).child("noise")
