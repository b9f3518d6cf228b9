"""The benchmark of per-example clipping runs, small, and its rows say what was compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks import per_example_speed as per_example
from benchmarks.opacus_steps import OPACUS_MODES
from discreet.per_example.per_example import clipped_gradient_sum


@pytest.mark.slow
def test_every_comparison_has_a_row_and_a_peer_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = per_example.rows(["lr"], [4], seconds=0.001)
    timed = {row["what"]: row for row in found if row["kind"] in ("gradient", "step")}
    assert {"plain gradient", "clipped sum", "vmap(grad)", "noise", "plain step", "DP-SGD step"} <= timed.keys()
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in timed.values())
    assert [row["what"] for row in found if row["kind"] == "skipped"] == [f"Opacus {mode}" for mode in OPACUS_MODES]


def test_the_compared_sums_are_equal() -> None:
    model, inputs, targets = per_example.perceptron(), torch.randn(5, 1, 28, 28), torch.tensor([0, 1, 2, 3, 4])
    total, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=per_example.CLIP)
    torch.testing.assert_close(total, per_example.vmapped_sum(model, inputs, targets), rtol=1e-4, atol=1e-5)
