"""A value out of range is refused with its name, before anything is clipped, noised or drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from discreet.privacy.clipping import ClippedSum, clip_by_norm, clip_to_grid
from discreet.privacy.discrete_gaussian import LARGEST_VARIANCE, discrete_gaussian
from discreet.privacy.grid import LARGEST_SCALE, Grid, grid_for, grid_slack
from discreet.privacy.mechanisms import Gaussian, Laplace, analytic_gaussian_noise_multiplier
from discreet.privacy.quantile import QuantileEstimator, split_noise_multiplier
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.privacy.sampling import fixed_size_cohort, poisson_cohort, poisson_sample
from discreet.privacy.selection import TrialCount

NAN, INF = math.nan, math.inf
SOURCE, GRID, ROW = seeded_source(1193), Grid(0.5), torch.zeros(1, 2)
MECHANISMS = (Gaussian(1.0), Laplace(1.0))
NOISES = tuple(mechanism.add_noise for mechanism in MECHANISMS)
DRAWS = (SOURCE.words, SOURCE.uniform, SOURCE.normal, SOURCE.laplace, SOURCE.permutation)
SUMS = (ClippedSum(3, 1.0), ClippedSum(3, 1.0, grid=GRID))


def quantile(**given: float) -> QuantileEstimator:
    return QuantileEstimator(**{"estimate": 1.0, "target_quantile": 0.5, "learning_rate": 0.2, **given})


REFUSED: list[tuple[Callable[..., object], tuple[object, ...], dict[str, object], str]] = [
    *((clip_by_norm, (rows, 1.0), {}, "floating point of shape") for rows in (ROW.long(), ROW[0])),
    *((clip_by_norm, (ROW, clip), {}, "clip_norm must be within") for clip in (-1.0, NAN)),
    *((clip_to_grid, (ROW[0], clip), {"grid": GRID}, "clip_norm must be in") for clip in (0.0, INF, NAN, 2.0**26)),
    *((total.add, (ROW,), {}, "must be floating point of shape") for total in SUMS),
    *(
        (discrete_gaussian, (1, wrong, SOURCE), {}, "variance must be")
        for wrong in (-1, 1.5, True, LARGEST_VARIANCE + 1)
    ),
    *((Grid, (step,), {}, "power of two") for step in (0.0, 0.3, NAN, 2.0**-1030)),
    (grid_for, (NAN, 3), {}, "clip_norm"),
    (grid_for, (1.0, 0), {}, "num_params"),
    (grid_for, (1.0, 1_000_000), {"largest_cohort": 10**13}, "could overflow int64"),
    (grid_slack, (3, INF), {}, "must be finite and >= 0"),
    *(
        (draw, (3, scale, SOURCE), {}, r"noise must be in \[0, 2\^32\] steps")
        for draw in (GRID.gaussian, GRID.laplace)
        for scale in (-1.0, INF, NAN, LARGEST_SCALE)
    ),
    *((Gaussian, (noise,), {}, "noise_multiplier must be finite and at least 0") for noise in (-0.1, NAN)),
    (Gaussian, (1.0,), {"draws": 0}, "draws must be >= 1"),
    (Laplace, (-0.1,), {}, "noise_multiplier must be finite and at least 0"),
    *(
        (noise, (ROW, wrong, SOURCE), {}, "must be finite and above 0")
        for noise in NOISES
        for wrong in (0.0, -1.0, NAN)
    ),
    *((noise, (ROW, wrong, SOURCE), {}, "vanish or overflow") for noise in NOISES for wrong in (1e-40, 1e38)),
    *((noise, (ROW + wrong, 1.0, SOURCE), {}, "total must be finite") for noise in NOISES for wrong in (NAN, INF)),
    *((noise, (rows, 1.0, SOURCE), {}, "must be float32 or") for noise in NOISES for rows in (ROW.half(), ROW.long())),
    *((each.add_grid_noise, (ROW, 1.0), {"grid": GRID, "source": SOURCE}, "must be int64") for each in MECHANISMS),
    *(
        (split_noise_multiplier, (2.0,), {"count_stddev": wrong}, "count_stddev must be > noise")
        for wrong in (1.0, NAN)
    ),
    (analytic_gaussian_noise_multiplier, (-1.0,), {"delta": 0.1}, "epsilon must be in"),
    (analytic_gaussian_noise_multiplier, (1.0,), {"delta": 0.0}, "delta must be in"),
    *(
        (quantile, (), {name: wrong}, name)
        for name, wrong in {"estimate": 0.0, "target_quantile": 1.0, "learning_rate": NAN, "ceiling": 0.9}.items()
    ),
    *((draw, (-1,), {}, "count must be >= 0") for draw in DRAWS),
    *((draw, (-1, 1.0, SOURCE), {}, "count must be >= 0") for draw in (GRID.gaussian, GRID.laplace)),
    (discrete_gaussian, (-1, 1, SOURCE), {}, "count must be >= 0"),
    (SOURCE.normal, (3,), {"draws": 0}, "draws must be"),
    *((SOURCE.normal, (3,), {"stddev": wrong}, "stddev must be") for wrong in (-1.0, INF, NAN)),
    *((seeded_source, (seed,), {}, "seed must be an int >= 0") for seed in (-1, True, 1.5, None)),
    (RandomSource, (b"short",), {"is_secure": True}, "32 bytes"),
    (SOURCE.child, (1.0,), {}, "float"),
    (poisson_sample, (-1,), {"probability": 1.0, "source": SOURCE}, "count must be >= 0"),
    *((poisson_sample, (3,), {"probability": q, "source": SOURCE}, "probability must be in") for q in (1.0001, NAN)),
    (poisson_cohort, ([5, 6, 5], 0.5, SOURCE), {}, "distinct"),
    (fixed_size_cohort, ([5, 6, 5], 2, SOURCE), {}, "distinct"),
    (fixed_size_cohort, ([5, 6, 7], 4, SOURCE), {}, "cohort_size must be in"),
    (TrialCount, ("uniform", 5), {}, "distribution"),
    *((TrialCount, ("poisson", mean), {}, "mean") for mean in (0.5, NAN)),
]


@pytest.mark.parametrize(("call", "given", "named", "said"), REFUSED)
def test_a_value_out_of_range_is_refused_with_its_name(
    call: Callable[..., object], given: tuple[object, ...], named: dict[str, object], said: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call(*given, **named)
