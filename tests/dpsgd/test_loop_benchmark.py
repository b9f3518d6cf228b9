"""The benchmark of private loops: what it compares is the same work, and its rows say what was compared."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from benchmarks import loop_speed, opacus_steps, people_models


def _missing(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}")


@pytest.mark.slow
def test_a_row_has_each_ratio_and_the_reason_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (opacus_steps, people_models):
        monkeypatch.setattr(module, "import_module", _missing)
    found, skipped, medians = loop_speed.rows(["Opacus mnist", "BERT"], seconds=0.0)
    assert found["way"] == "watched"
    assert found["error"] < 1e-4
    assert found["Opacus"] == "none: No module named 'opacus'"
    assert min(found[name] for name in ("sum", "step", "memory")) > 0
    assert skipped == {"model": "BERT", "way": "No module named 'transformers'"}
    assert medians["sum"] == found["sum"]
    assert "Opacus/step" not in medians


def test_the_error_is_that_of_the_clipped_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    case, right = people_models.CASES["two towers"](), loop_speed.clipped_sum
    case = case._replace(inputs={name: ids[:8] for name, ids in case.inputs.items()}, targets=case.targets[:8])
    assert loop_speed.error_of(case) < 1e-4

    def wrong(case: people_models.Case, clip_norm: float) -> tuple[Tensor, Tensor]:
        total, norms = right(case, clip_norm)
        return 1.01 * total, norms

    monkeypatch.setattr(loop_speed, "clipped_sum", wrong)
    assert loop_speed.error_of(case) > 5e-3
