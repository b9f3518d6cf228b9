"""A clip norm that follows a quantile of norms, as the loops and the server of a federation are asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from discreet.privacy.clipping import check_clip
from discreet.privacy.quantile import (
    QuantileEstimator,
    default_count_stddev,
    split_noise_multiplier,
)
from discreet.settings.privacy import ceiling_of

LARGEST_DOUBT = 0.2  # the share that says "much too short" is 0.5 away from the one that says "right"
# If no clip norm is given: noise for one that is far too long undoes what was learned, one that is too short costs a
# round. Their steps multiply the norm by at most exp(5 / 2) = 12, then 3.5, 1.9, ...
FIRST_NORM, LARGEST_NORM, SEARCH_RATE = 0.1, 10.0, 5.0


@dataclass(frozen=True)
class AdaptiveClipping:
    """A clip norm that tracks a quantile of the norms of the differences, of `DPSGD` of the gradients: Andrew et al.
    2021 (arXiv 1905.03871).

    Attributes:
      norm: the first one. None: the first rounds or steps search for it from 0.1 on, up to 10, by the noised bits
        that are paid for anyway.
      maximum: what it never passes; None is ten times `norm`, or 10 without it.
      target_quantile: of the norms, within (0, 1).
      learning_rate: of the steps by which it moves.
      count_stddev: noise on the count of norms within it; None is a small share of what the round costs.
    """

    norm: float | None = None
    maximum: float | None = None
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_stddev: float | None = None

    @property
    def start(self) -> tuple[float, float | None, float]:
        """The first norm, the largest one (None: follows from the first), and the rate of the search, 0 for none."""
        if self.norm is not None:
            return self.norm, self.maximum, 0.0
        return FIRST_NORM, LARGEST_NORM if self.maximum is None else self.maximum, SEARCH_RATE


@dataclass(frozen=True)
class AdaptiveNorm:
    """A clip norm C that follows a quantile of the gradients' norms through noised counts, as a federation's does.

    Guarantee: a step of noise multiplier z releases the sum of gradients clipped to C with noise of z_sum * C, and the
    sum of (b - 1/2), b = [norm <= C], whose sensitivity is 1/2, with noise of `count_stddev`: together they cost one
    Gaussian of multiplier z (Andrew et al. 2021, Theorem 1). `largest_noise` is the largest z of the loop.
    """

    settings: AdaptiveClipping
    batch_size: int
    largest_noise: float

    def __post_init__(self) -> None:
        self.after(self.first, step=0, centred_count=0.0)
        split_noise_multiplier(self.largest_noise, count_stddev=self.count_stddev)
        if self.settings.norm is None and self.count_stddev >= LARGEST_DOUBT * self.batch_size:
            raise ValueError(
                "clip_norm: give AdaptiveClipping(norm=...): noise on the count would hide a norm from search"
            )

    @property
    def first(self) -> float:
        """The clip norm of step 0."""
        return self.settings.start[0]

    @property
    def count_stddev(self) -> float:
        """The standard deviation of the noise on the count."""
        usual = default_count_stddev(self.batch_size, noise_multiplier=self.largest_noise)
        return usual if self.settings.count_stddev is None else self.settings.count_stddev

    def after(self, clip_norm: float, *, step: int, centred_count: float) -> float:
        """The clip norm that follows on a step's clip norm and its noised count."""
        check_clip(clip_norm, "clip_norm")
        given, (first, most, search_rate) = self.settings, self.settings.start
        estimator = QuantileEstimator(
            clip_norm,
            given.target_quantile,
            given.learning_rate,
            ceiling_of(first, most),
            search_rate=search_rate * 0.5**step,
            doubt=2 * self.count_stddev / self.batch_size,
        )
        return estimator.update(centred_count, expected_cohort=self.batch_size)[0].estimate
