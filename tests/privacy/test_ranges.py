"""A value out of range is refused with its name, before anything is clipped, noised or drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from discreet.privacy.clipping import ClippedSum, clip_by_norm, clip_to_grid
from discreet.privacy.discrete_gaussian import LARGEST_VARIANCE, discrete_gaussian
from discreet.privacy.grid import LARGEST_SCALE, Grid, grid_for
from discreet.privacy.mechanisms import Gaussian, Laplace, analytic_gaussian_noise_multiplier
from discreet.privacy.quantile import split_noise_multiplier
from discreet.privacy.randomness import seeded_source
from discreet.privacy.sampling import fixed_size_cohort, poisson_cohort, poisson_sample
from discreet.privacy.selection import TrialCount

NAN, INF = math.nan, math.inf
SOURCE, GRID, ROW = seeded_source(1193), Grid(0.5), torch.zeros(1, 2)
MECHANISMS = (Gaussian(1.0), Laplace(1.0))
NOISES = tuple(mechanism.add_noise for mechanism in MECHANISMS)
SUMS = (ClippedSum(3, 1.0), ClippedSum(3, 1.0, grid=GRID))


REFUSED: list[tuple[Callable[..., object], tuple[object, ...], dict[str, object], str]] = [
    *((clip_by_norm, (ROW, clip), {}, "clip_norm must be within") for clip in (-1.0, NAN)),
    (clip_to_grid, (ROW[0], 2.0**26), {"grid": GRID}, "clip_norm must be in"),
    *((total.add, (ROW,), {}, "must be floating point of shape") for total in SUMS),
    *((discrete_gaussian, (1, wrong, SOURCE), {}, "variance must be") for wrong in (-1, 1.5, LARGEST_VARIANCE + 1)),
    (Grid, (0.3,), {}, "power of two"),
    (grid_for, (1.0, 1_000_000), {"largest_cohort": 10**13}, "could overflow int64"),
    *((GRID.gaussian, (3, scale, SOURCE), {}, "noise must be in") for scale in (-1.0, NAN, LARGEST_SCALE)),
    *((kind, (noise,), {}, "noise_multiplier must be finite") for kind in (Gaussian, Laplace) for noise in (-0.1, NAN)),
    *((noise, (ROW, wrong, SOURCE), {}, "must be finite and above 0") for noise in NOISES for wrong in (0.0, NAN)),
    *((noise, (ROW, wrong, SOURCE), {}, "vanish or overflow") for noise in NOISES for wrong in (1e-40, 1e38)),
    *((noise, (ROW + wrong, 1.0, SOURCE), {}, "total must be finite") for noise in NOISES for wrong in (NAN, INF)),
    *((noise, (ROW.half(), 1.0, SOURCE), {}, "must be float32 or") for noise in NOISES),
    *((each.add_grid_noise, (ROW, 1.0), {"grid": GRID, "source": SOURCE}, "must be int64") for each in MECHANISMS),
    (split_noise_multiplier, (2.0,), {"count_stddev": 1.0}, "count_stddev must be > noise"),
    (analytic_gaussian_noise_multiplier, (1.0,), {"delta": 0.0}, "delta must be in"),
    *((seeded_source, (seed,), {}, "seed must be an int >= 0") for seed in (-1, True, None)),
    (poisson_sample, (3,), {"probability": NAN, "source": SOURCE}, "probability must be in"),
    *(
        (draw, ([5, 6, 5], how, SOURCE), {}, "distinct")
        for draw, how in ((poisson_cohort, 0.5), (fixed_size_cohort, 2))
    ),
    (fixed_size_cohort, ([5, 6, 7], 4, SOURCE), {}, "cohort_size must be in"),
    (TrialCount, ("poisson", NAN), {}, "mean"),
]


@pytest.mark.parametrize(("call", "given", "named", "said"), REFUSED)
def test_a_value_out_of_range_is_refused_with_its_name(
    call: Callable[..., object], given: tuple[object, ...], named: dict[str, object], said: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call(*given, **named)
