"""How long the noise of a round is, beside the clip norm and beside the signal of a step."""

from __future__ import annotations

import math

from torch import Tensor


def noise_ratio(noise_multiplier: float, *, num_params: int, expected_cohort: float) -> float:
    """The expected norm of a round's noise, as a multiple of its clip norm: z * sqrt(num_params) / expected_cohort.

    `noise_multiplier` is that of the update (`UserPrivacy.update_noise_multiplier`). No update moves the average by
    more than 1 / expected_cohort of the clip norm, and all of them together by the clip norm at most.

    >>> round(noise_ratio(1.03, num_params=9610, expected_cohort=60), 2)
    1.68
    """
    return noise_multiplier * math.sqrt(num_params) / expected_cohort


def signal_share(velocity: Tensor, *, noise_energy: float) -> float:
    """How much of a step's length is signal, by what its noise is expected to be: within [0, 1].

    |velocity|^2 is on average the squared norm of the signal plus `noise_energy`, so that the signal's norm is about
    sqrt(1 - noise_energy / |velocity|^2) of it; the positive part of it, as in James and Stein 1961. 1 where there is
    no noise, 0 where the step is no longer than noise alone would be. Post-processing of what was released.

    >>> import torch
    >>> signal_share(torch.tensor([3.0, 4.0]), noise_energy=16.0)
    0.6
    """
    if noise_energy == 0:
        return 1.0
    energy = float(velocity.double().square().sum())
    return math.sqrt(max(0.0, 1 - noise_energy / energy)) if energy > 0 else 0.0
