"""Epsilon of one Gaussian release, beside dp_accounting's."""

from __future__ import annotations

import math

import pytest
from dp_accounting import get_epsilon_gaussian

from discreet.accounting.unsampled_gaussian import gaussian_epsilon

NOISES = [10.0 ** (power / 7) for power in range(-20, 29)]
DELTAS = [10.0**-power for power in (0.3, 1, 2.7, 5, 9, 12, 17, 30)]


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("delta", DELTAS)
def test_each_digit_is_that_of_dp_accounting(delta: float) -> None:
    found = [gaussian_epsilon(noise, delta=delta) for noise in NOISES]
    assert found == [get_epsilon_gaussian(noise, delta) for noise in NOISES]
    assert len({*found}) > len(NOISES) / 3


@pytest.mark.parametrize(
    ("noise", "delta", "epsilon"),
    [(0.0, 1e-5, math.inf), (math.inf, 1e-5, 0.0), (2.0, 0.0, math.inf), (2.0, 1.0, 0.0)],
)
def test_ends_of_the_ranges(noise: float, delta: float, epsilon: float) -> None:
    assert gaussian_epsilon(noise, delta=delta) == epsilon == get_epsilon_gaussian(noise, delta)


@pytest.mark.parametrize(
    ("noise", "delta"), [(-1.0, 1e-5), (2.0, -0.1), (2.0, 1.1), (2.0, math.nan)]
)
def test_what_is_out_of_range_is_refused(noise: float, delta: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        gaussian_epsilon(noise, delta=delta)
