"""What clients hold out: fixed, theirs alone, and never trained on."""

from __future__ import annotations

import pytest
import torch

from discreet.tasks.partition import held_out_rows, split_rows

SHARES = pytest.mark.parametrize("share", [0.05, 0.2, 1 / 3, 0.5, 0.9])


@SHARES
@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 100, 1001])
def test_every_row_is_trained_on_or_held_out_and_the_share_is_kept(count: int, share: float) -> None:
    trained, held = split_rows(count, 7, share=share)
    assert sorted([*trained.tolist(), *held.tolist()]) == list(range(count))
    assert abs(len(held) - count * share) < 1


@SHARES
def test_rows_that_are_added_leave_what_was_held_out_as_it_is(share: float) -> None:
    before = held_out_rows(500, 3, share=share)
    after = held_out_rows(560, 3, share=share)
    assert torch.equal(after[after < 500], before)


def test_clients_hold_out_different_rows_and_each_always_the_same() -> None:
    rows = [tuple(held_out_rows(200, client, share=0.2).tolist()) for client in range(50)]
    assert len(set(rows)) == 50
    assert rows[7] == tuple(held_out_rows(200, 7, share=0.2).tolist())


def test_every_row_of_a_run_is_as_likely() -> None:
    counts = torch.zeros(10)
    for client in range(5000):
        counts[held_out_rows(10, client, share=0.2)] += 1
    assert (counts - 1000).abs().max() < 6 * (5000 * 0.2 * 0.8) ** 0.5  # the rule is fixed: this holds or never does
