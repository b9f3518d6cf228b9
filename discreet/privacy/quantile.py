"""The adaptive clip norm, which tracks a quantile of the update norms by noised counts (Andrew et
al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from discreet.accounting.events import check_noise_multiplier, check_positive

# The range of clip norms and of other positive numbers that a server sends: far inside that of
# float32. The margin of `clip_factors` relies on it: the smallest floats don't matter to a clip
# norm.
LEAST_NUMBER = 1e-9
LARGEST_NUMBER = 1e9
BIT_SENSITIVITY = 0.5  # a client adds b - 1/2, which is -1/2 or +1/2


def default_count_stddev(expected_cohort: float, *, noise_multiplier: float) -> float:
    """max(cohort / 20, 2.54 * z): never more than 2 % extra noise on the update, and usable for
    small cohorts.

    >>> default_count_stddev(100, noise_multiplier=1.0)
    5.0
    """
    return max(expected_cohort / 20, 2.54 * noise_multiplier)


@dataclass(frozen=True)
class QuantileEstimator:
    """The clip norm `estimate`, which tracks the `target_quantile` of the update norms by steps in
    log space.

    Guarantee: `update` reads the clients' bits only through `centred_count`, the noised sum of (b -
    1/2), whose sensitivity is 1/2 (add or remove one client). Its cost is part of the round's event
    (`split_noise_multiplier`). Source: Andrew, Thakkar, McMahan, Ramaswamy 2021 (arXiv 1905.03871),
    Section 2 and Algorithm 1.

    `ceiling` is a public constant that the estimate never passes. Far from the median an extra step
    is made: `search_rate` times the distance of the fraction from one half, less `doubt`, the reach
    of the noise.
    """

    estimate: float
    target_quantile: float
    learning_rate: float
    ceiling: float = LARGEST_NUMBER
    search_rate: float = 0.0
    doubt: float = 0.0

    def __post_init__(self) -> None:
        check_positive("estimate", self.estimate)
        check_positive("learning_rate", self.learning_rate)
        if not 0 < self.target_quantile < 1:
            raise ValueError(f"target_quantile must be within (0, 1) (got {self.target_quantile})")
        if not self.estimate <= self.ceiling <= LARGEST_NUMBER:
            raise ValueError(
                f"ceiling must be within [estimate, {LARGEST_NUMBER:g}] (got {self.ceiling})"
            )

    def update(
        self, centred_count: float, *, expected_cohort: float
    ) -> tuple[QuantileEstimator, float]:
        """The estimator after one step, and the noised fraction of norms at or below the clip norm,
        within [0, 1].

        `centred_count` is the sum of (b - 1/2) over the replies, plus Gaussian(count_stddev);
        `expected_cohort` is q * population_size, a public constant above 0.

        >>> estimator = QuantileEstimator(1.0, 0.5, 0.2)
        >>> estimator, fraction = estimator.update(-50.0, expected_cohort=100)
        >>> fraction, round(estimator.estimate, 4)     # all norms lie above: the clip norm grows
        (0.0, 1.1052)
        """
        check_positive("expected_cohort", expected_cohort)
        fraction = min(1.0, max(0.0, centred_count / expected_cohort + 0.5))
        sure = max(0.0, abs(fraction - 0.5) - self.doubt)
        step = self.learning_rate * (fraction - self.target_quantile)
        step += self.search_rate * math.copysign(sure, fraction - 0.5)
        # e^50 is more than the range of estimates.
        estimate = self.estimate * math.exp(min(-step, 50.0))
        return replace(self, estimate=min(self.ceiling, max(LEAST_NUMBER, estimate))), fraction

    def next_clip_norm(
        self,
        clip_norm: float,
        centred_count: float,
        *,
        number: int,
        expected_cohort: float,
        count_stddev: float,
    ) -> tuple[float, float]:
        """The clip norm after round `number`, from 0, whose clip norm was `clip_norm`, and the
        fraction of norms within that; otherwise as `update`. `count_stddev`: of the noise in
        `centred_count`."""
        estimator = replace(
            self,
            # A run may be resumed with a lower ceiling than the norm that it has reached.
            estimate=min(clip_norm, self.ceiling),
            # The search halves its interval, in the logarithm of the norm.
            search_rate=self.search_rate * 0.5**number,
            doubt=2 * count_stddev / expected_cohort,
        )
        moved, fraction = estimator.update(centred_count, expected_cohort=expected_cohort)
        return moved.estimate, fraction


def split_noise_multiplier(noise_multiplier: float, *, count_stddev: float) -> float:
    """The noise multiplier of the update with which the update and the norm bits together cost one
    Gaussian of `noise_multiplier`.

    z_update = (z^-2 - (2 * count_stddev)^-2)^(-1/2) (Andrew et al. 2021, Theorem 1). 0 gives 0.
    Raises ValueError if count_stddev <= z / 2: then the bits alone cost more than Gaussian(z).

    >>> round(split_noise_multiplier(1.0, count_stddev=5.0), 6)
    1.005038
    """
    check_noise_multiplier(noise_multiplier)
    if count_stddev > 0:
        share = noise_multiplier / (2 * count_stddev)
    else:
        share = math.inf
    if not share < 1:
        raise ValueError(
            f"count_stddev must be > noise_multiplier / 2 = {noise_multiplier / 2}, not "
            f"{count_stddev}"
        )
    return noise_multiplier / math.sqrt((1 - share) * (1 + share))
