"""Clipping bounds every row, whatever it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from discreet.privacy.clipping import clip_by_norm

WILD = st.floats(width=32, allow_nan=True, allow_infinity=True)
ROWS = arrays(np.float32, st.tuples(st.integers(0, 6), st.integers(1, 8)), elements=WILD)
CLIPS = st.floats(1e-3, 1e3)


def exact_norm(row: torch.Tensor, order: float) -> float:
    values = [abs(value) for value in row.double().tolist()]
    return math.fsum(values) if order == 1 else math.sqrt(math.fsum(value * value for value in values))


@given(rows=ROWS, norm_clip=CLIPS, order=st.sampled_from([1, 2]))
def test_no_row_leaves_with_more_than_the_clip_norm(rows: np.ndarray, norm_clip: float, order: int) -> None:
    clipped, _ = clip_by_norm(torch.from_numpy(rows), norm_clip, order=order)
    assert all(exact_norm(row, order) <= norm_clip for row in clipped)


@given(rows=ROWS, norm_clip=CLIPS)
def test_rows_that_are_not_finite_become_zero(rows: np.ndarray, norm_clip: float) -> None:
    clipped, norms = clip_by_norm(torch.from_numpy(rows), norm_clip)
    wild = ~np.isfinite(rows).all(axis=1)
    assert not clipped[wild].any()
    assert torch.isinf(norms[wild]).all()


@given(rows=ROWS)
def test_rows_within_the_clip_norm_are_not_touched(rows: np.ndarray) -> None:
    small = torch.from_numpy(np.nan_to_num(rows, nan=0, posinf=0, neginf=0)).clamp(-1, 1)
    clipped, norms = clip_by_norm(small, 10.0)
    assert torch.equal(clipped, small)
    assert np.allclose(norms, np.linalg.norm(small.double().numpy(), axis=1))


def test_half_precision_that_overflows_its_own_norm_is_clipped_not_dropped() -> None:
    row = torch.full((1, 100), 60000.0, dtype=torch.float16)
    clipped, norms = clip_by_norm(row, 1.0)
    assert norms[0].item() == pytest.approx(600_000, rel=1e-3)
    assert clipped.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_an_infinite_clip_norm_keeps_everything_that_is_finite() -> None:
    rows = torch.tensor([[1e30, 0.0], [math.nan, 1.0]])
    clipped, _ = clip_by_norm(rows, math.inf)
    assert clipped.tolist() == [[pytest.approx(1e30), 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("norm_clip", [-1.0, math.nan])
def test_a_clip_norm_that_is_no_norm_is_refused(norm_clip: float) -> None:
    with pytest.raises(ValueError, match="norm_clip"):
        clip_by_norm(torch.zeros(1, 2), norm_clip)


def test_integers_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="floating point"):
        clip_by_norm(torch.ones(1, 2, dtype=torch.int64), 1.0)
    with pytest.raises(ValueError, match="shape"):
        clip_by_norm(torch.zeros(3), 1.0)
