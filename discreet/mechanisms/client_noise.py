"""The noise that a client draws itself, on its whole update and on its answers to queries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from discreet.privacy.mechanisms import Gaussian, Laplace
    from discreet.privacy.randomness import RandomSource


@dataclass(frozen=True)
class LocalPrivacy:
    """The local mechanism of one round: its kind, the clip norm, and the noise over the
    sensitivity."""

    kind: str
    clip_norm: float
    noise_multiplier: float
    noise: str = "float"

    @property
    def mechanism(self) -> Gaussian | Laplace:
        """Gaussian noise for the L2 sensitivity, or Laplace noise for the L1 sensitivity."""
        from discreet.privacy.mechanisms import Gaussian, Laplace

        if self.kind == "gaussian":
            return Gaussian(self.noise_multiplier, self.noise)
        return Laplace(self.noise_multiplier)

    @property
    def event(self) -> DpEvent:
        """The cost of one release. Sampling of cohorts does not lower it, because the server sees
        which clients send."""
        return self.mechanism.event()


def release_update(update: Tensor, privacy: LocalPrivacy, *, source: RandomSource) -> Tensor:
    """Clips a whole update (num_params,) and noises it: kinds `gaussian` (L2) and `laplace` (L1).

    Guarantee: replacing all of the client's data moves the clipped update by at most 2 * clip_norm,
    and the noise is drawn for that. On the grid both hold in exact arithmetic. An update that is
    not finite is released as zero plus noise.
    """
    from discreet.privacy.clipping import clip_by_norm, clip_to_grid
    from discreet.privacy.grid import grid_for

    if privacy.kind == "gaussian":
        order = 2
    else:
        order = 1
    sensitivity = 2 * privacy.clip_norm
    if privacy.noise != "grid":
        clipped, _ = clip_by_norm(update.unsqueeze(0), privacy.clip_norm, order=order)
        return privacy.mechanism.add_noise(clipped[0], sensitivity, source)
    grid = grid_for(
        privacy.clip_norm,
        len(update),
        largest_cohort=1,
        noise_scale=privacy.noise_multiplier * sensitivity,
    )
    steps = clip_to_grid(update, privacy.clip_norm, grid=grid, order=order)
    return grid.to_float(
        privacy.mechanism.add_grid_noise(steps, sensitivity, grid=grid, source=source)
    )


@dataclass(frozen=True)
class OwnNoise:
    """The noise of a client on its own answer to a query, whoever is in the cohort: the server sees
    who answers.

    Guarantee for all of its data (replace): an answer is clipped to a norm that it can't pass
    anyway, in L2 for Gaussian noise and in L1 for Laplace noise, so replacing this client's data
    moves it by at most twice that norm. Noise is drawn for that (`release_update`), also on the
    zeros of a client without held-out examples: the number of examples that a client holds is
    hidden too.

    Guarantee `of_examples` (zero-out: one example contributes nothing, and how many there are
    stays): an answer is the mean, over m held-out examples, of vectors of L2 norm at most 1
    (`client_settings.MEANS`), so one of them moves it by at most 1 / m, and Gaussian noise is drawn
    for that.
    """

    privacy: LocalPrivacy
    of_examples: bool = False

    def within(self, l1_norm: float) -> OwnNoise:
        """The same noise for answers of at most this L1 norm, which Laplace noise is for."""
        if self.privacy.kind != "laplace":
            return self
        return replace(self, privacy=replace(self.privacy, clip_norm=l1_norm))

    @property
    def unit(self) -> float:
        """The standard deviation on each number, over the noise multiplier; for m examples it is
        divided by m."""
        if self.of_examples:
            return 1.0
        # Laplace noise is for the L1 norm, and its standard deviation is sqrt(2) times its scale.
        return (
            2.0 if self.privacy.kind == "gaussian" else 2 * math.sqrt(2)
        ) * self.privacy.clip_norm

    def noised(self, answer: Tensor, held_out: int, source: RandomSource) -> Tensor:
        """An answer (length,) about `held_out` examples, noised: (length + 1,), float32. Its last
        number is the variance of the noise on each of the others. With `of_examples` the variance
        follows from `held_out`, which zero-out does not hide, and a client without held-out
        examples sends zeros, as if it were missing."""
        import torch

        if self.of_examples and held_out == 0:
            return torch.zeros(len(answer) + 1)
        source = source.child("answer")
        stddev = self.unit * self.privacy.noise_multiplier
        if self.of_examples:
            stddev /= held_out
            sent = self.privacy.mechanism.add_noise(answer.double(), 1 / held_out, source)
        else:
            sent = release_update(answer.to(torch.float32), self.privacy, source=source).double()
        return torch.cat([sent, torch.tensor([stddev**2], dtype=torch.float64)]).to(torch.float32)
