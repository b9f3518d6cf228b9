"""The noise of a round beside the clip norm and a step's signal, and the limit up to which a run learns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The noise feedback up to which a run learns, and if its steps are as long as their signal. Measured: docs/pitfalls.md.
LARGEST_FEEDBACK, LARGEST_FEEDBACK_SHRINKING = 6.5, 23.0
EARLY_ROUNDS = 10  # a run that is over by then ends before noise that feeds itself has grown
FULL_LOCAL_WORK = 0.2  # clients that learn less than this in a round answer noise in proportion


def noise_ratio(noise_multiplier: float, *, num_params: int, expected_cohort: float) -> float:
    """The expected norm of a round's noise, as a multiple of its clip norm: z * sqrt(num_params) / expected_cohort.

    `noise_multiplier` is that of the update (`central_gaussian.update_noise_multiplier`).

    >>> round(noise_ratio(1.03, num_params=9610, expected_cohort=60), 2)
    1.68
    """
    return noise_multiplier * math.sqrt(num_params) / expected_cohort


def noise_feedback(ratio: float, *, learning_rate: float, momentum: float, local_work: float) -> float:
    """The noise feedback of a run: ratio * sqrt(eta / (1 - m)) * min(1, w / 0.2), with `noise_ratio` for the ratio.

    Noise moves the model away from where clients want it; they answer with updates as long as they are far away, an
    adaptive clip norm follows these, and the noise follows the clip norm. Heavy-ball steps of the server's rate eta
    and momentum m on an error whose noise is proportional to it have a stationary mean square only while ratio^2 * eta
    / (1 - m) is below a constant of the task; above it the error grows by a factor each round. Clients whose local
    work w, epochs * learning rate / (1 - momentum), is small answer in proportion to it.

    >>> round(noise_feedback(1.68, learning_rate=1.0, momentum=0.8, local_work=1.0), 2)
    3.76
    """
    return ratio * math.sqrt(learning_rate / (1 - momentum)) * min(1.0, local_work / FULL_LOCAL_WORK)


def signal_share(velocity: Tensor, *, noise_energy: float) -> float:
    """The share of a step's length that is signal, given the expected energy of its noise: within [0, 1].

    |velocity|^2 is on average the squared norm of the signal plus `noise_energy`: the positive part of sqrt(1 -
    noise_energy / |velocity|^2), as in James and Stein 1961. 1 without noise. Post-processing of a release.

    >>> import torch
    >>> signal_share(torch.tensor([3.0, 4.0]), noise_energy=16.0)
    0.6
    """
    if noise_energy == 0:
        return 1.0
    energy = float(velocity.double().square().sum())
    return math.sqrt(max(0.0, 1 - noise_energy / energy)) if energy > 0 else 0.0
