"""The benchmark of private loops: what it compares is the same work."""

from __future__ import annotations

import pytest
from torch import Tensor

from benchmarks import loop_speed, people_models


def test_the_error_is_that_of_the_clipped_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = people_models.CASES["two towers"](), loop_speed.clipped_sum
    case = case._replace(inputs={name: ids[:8] for name, ids in case.inputs.items()}, targets=case.targets[:8])
    assert loop_speed.error_of(case) < 1e-4

    def wrong(case: people_models.Case, clip_norm: float) -> tuple[Tensor, Tensor]:
        total, norms = right(case, clip_norm)
        return 1.01 * total, norms

    monkeypatch.setattr(loop_speed, "clipped_sum", wrong)
    assert loop_speed.error_of(case) > 5e-3
