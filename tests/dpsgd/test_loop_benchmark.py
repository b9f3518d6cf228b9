"""The benchmark of private loops: what it compares is the same work, and its rows say what was compared."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks import loop_speed
from benchmarks.opacus_steps import OPACUS_MODES
from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.step_account import LoopPrivacy
from tests.node.clients import params_of

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", loop_speed.CASES)
def test_without_clip_and_noise_the_private_step_is_the_plain_one(name: str) -> None:
    build, draw, _ = loop_speed.CASES[name]
    one, other, batch = build(), build(), (draw(4), torch.tensor([0, 1, 1, 0]))
    other.load_state_dict(one.state_dict())
    loop_speed.plain_step(one, batch)()
    optimizer = torch.optim.SGD(other.parameters(), lr=loop_speed.LEARNING_RATE)
    data, privacy = TensorDataset(*batch), LoopPrivacy(noise_multiplier=0.0)
    loop = DPSGD(other, optimizer, data, batch_size=4, epochs=1, delta=1e-5, clip_norm=1e4, privacy=privacy)
    loop.step(*next(iter(loop)))
    torch.testing.assert_close(params_of(one), params_of(other), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_comparison_has_a_row_and_a_peer_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loop_speed.main(["--models", "embedding", "--rounds", "1", "--json", str(tmp_path / "times.json")])
    found = json.loads((tmp_path / "times.json").read_text())
    assert [row["what"] for row in found if "ms" in row] == ["plain step", "DPSGD.step", "noise"]
    assert [row["what"] for row in found if "reason" in row] == [f"Opacus {mode}" for mode in OPACUS_MODES]
    assert "DPSGD.step" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "dpsgd" / "train.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("epsilon 3.000 at delta 1e-4")
    assert float(said.split()[-1]) > 0.6
