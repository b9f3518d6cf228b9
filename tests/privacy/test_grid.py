"""On the grid sums are exact, norms only shrink, and the slack of finite precision is at least what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from discreet.privacy.grid import grid_slack, laplace_grid_slack


@pytest.mark.parametrize("bits", [7, 9, 11])
@pytest.mark.parametrize("stddev", [0.3, 2.0, 7.5])
def test_the_slack_bounds_the_distance_counted_with_few_bits(bits: int, stddev: float) -> None:
    """All midpoints, rounded and counted, against the chances of the rounded Gaussian and of Laplace noise."""
    middles, edges = (np.arange(2**bits) + 0.5) / 2**bits, np.arange(-400, 402) - 0.5
    radii, sizes = np.sqrt(-2 * np.log(middles))[:, None], -np.log(middles)
    gaussian, laplace = (np.diff(law.cdf(edges / stddev)) for law in (stats.norm, stats.laplace))
    for values, exact, slack in (
        (radii * np.cos(2 * np.pi * middles), gaussian, grid_slack),
        (radii * np.sin(2 * np.pi * middles), gaussian, grid_slack),
        (np.concatenate((sizes, -sizes)), laplace, laplace_grid_slack),
    ):
        rounded = np.floor(stddev * values + 0.5).astype(int)
        drawn = np.bincount(rounded.ravel() + 400, minlength=801) / rounded.size
        assert 0 < np.abs(drawn - exact).sum() / 2 <= slack(1, stddev, bits=bits)
