"""What is predicted and how it is read, how inputs are scaled, and how rows are dealt and held
out."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from discreet.data.examples import to_unit_box
from discreet.data.partition import held_out_rows, partition_indices, split_rows
from discreet.data.targets import NUMBERS, Target, targets_of
from discreet.settings.data import DataConfig

PRICE = Target(NUMBERS, ("price", "rent"), (0.0, 10.0), (200.0, 20.0))


def read(values: object, target: Target) -> torch.Tensor:
    return targets_of(np.asarray(values), target, num_classes=3, what="table.csv")


def test_numbers_are_scaled_by_their_public_ranges_and_back() -> None:
    given = [[50.0, 15.0], [200.0, 10.0]]
    scaled = read(given, PRICE)
    assert scaled.tolist() == [[-0.5, 0.0], [1.0, -1.0]]
    assert PRICE.in_units(scaled).tolist() == given


def test_how_far_a_number_lies_outside_its_range_is_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        near, far = read([[201.0, 9.0]], PRICE), read([[1e9, -1e9]], PRICE)
    assert torch.equal(near, far)
    assert "2 of 2 targets lie outside target_low..target_high" in caplog.text


def test_scaling_maps_public_ranges_clamps_and_depends_on_no_other_row() -> None:
    ranges = ((20.0, 90.0), (-1.0, 1.0))
    low, high = np.array(ranges).T
    rows = np.stack([low - 1, low, (low + high) / 2, high, high * 3])
    scaled = to_unit_box(rows, ranges)
    assert np.allclose(scaled, np.array([-1, -1, 0, 1, 1])[:, None])
    assert np.array_equal(scaled, np.concatenate([to_unit_box(row[None], ranges) for row in rows]))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["iid", "dirichlet", "shards"]),
    st.integers(2, 90),
    st.integers(1, 40),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**32 - 1),
)
def test_every_example_has_exactly_one_client_and_none_is_empty(
    kind: str, examples: int, clients: int, alpha: float, seed: int
) -> None:
    clients = min(clients, examples // 2)
    data = DataConfig(num_clients=clients, partition=kind, partition_seed=seed, alpha=alpha)
    parts = partition_indices(torch.arange(examples) % 3, data)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert torch.cat(parts).sort().values.tolist() == list(range(examples))


SHARES = pytest.mark.parametrize("share", [0.05, 1 / 3, 0.9])


@SHARES
@pytest.mark.parametrize("count", [0, 1, 5, 1001])
def test_every_row_is_trained_on_or_held_out_and_the_share_is_kept(
    count: int, share: float
) -> None:
    trained, held = split_rows(count, 7, share=share)
    assert sorted([*trained.tolist(), *held.tolist()]) == list(range(count))
    assert abs(len(held) - count * share) < 1


@SHARES
def test_rows_that_are_added_leave_what_was_held_out_as_it_is(share: float) -> None:
    before = held_out_rows(500, 3, share=share)
    after = held_out_rows(560, 3, share=share)
    assert torch.equal(after[after < 500], before)


def test_every_row_of_a_run_is_as_likely() -> None:
    counts = torch.zeros(10)
    for client in range(5000):
        counts[held_out_rows(10, client, share=0.2)] += 1
    assert (counts - 1000).abs().max() < 6 * (
        5000 * 0.2 * 0.8
    ) ** 0.5  # the rule is fixed: this holds or never does
