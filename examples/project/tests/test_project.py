"""That the model fits the data, and that a short run keeps to its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.config import load_config
from discreet.federated.run_folder import RunFolder
from discreet.simulation.in_process import simulate
from discreet.tasks.datasets import load_task
from discreet.tasks.models import build_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # conf/ and the paths in it are those of the folder where a command starts


def test_the_model_takes_the_data() -> None:
    config = load_config()
    task = load_task(config.data.name, path=config.data.path)
    model = build_model(config.model.name, task.input_shape, task.num_classes, seed=7411)
    assert model(task.test.inputs[:5]).shape == (5, task.num_classes)


def test_a_short_run_stays_within_its_budget(tmp_path: Path) -> None:
    config = load_config(["experiment=quick", f"output_dir={tmp_path / 'run'}"])
    simulate(config)
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row["round"] for row in rows] == [1, 2]
    budget = config.privacy.user.target_epsilon
    assert budget is not None
    assert 0 < (rows[-1]["epsilon_user"] or 0) <= budget
