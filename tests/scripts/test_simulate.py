"""The command line of the simulation: Hydra's, with sweeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from discreet.config import load_config
from discreet.runs import RunFolder
from simulation.in_process import simulate

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["rounds=1", "data.num_clients=10", "model.name=logistic_regression", "training.epochs=1"]


def command(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "scripts.simulate", *words]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_help_shows_every_setting() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "target_quantile: 0.5" in done.stdout
    assert "round_timeout" in done.stdout


def test_a_sweep_leaves_one_run_folder_for_each_job(tmp_path: Path) -> None:
    done = command("--multirun", *SMALL, "privacy.user.clip.kind=adaptive,fixed", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(path.parent for path in tmp_path.glob("multirun/*/*/config.yaml"))
    kinds = [RunFolder(path).read_config().privacy.user.clip.kind for path in runs]
    assert kinds == ["adaptive", "fixed"]
    assert all((path / "privacy.json").exists() for path in runs)


@pytest.mark.parametrize("engine", ["one_by_one", "batched"])
def test_with_a_seed_a_run_can_be_repeated(engine: str, tmp_path: Path) -> None:
    words = [*SMALL, "rounds=2", "seed=60317", f"engine={engine}"]
    first, second = (
        simulate(load_config([*words, f"output_dir={tmp_path / name}"])).checkpoint for name in ("first", "second")
    )
    assert first.params.tolist() == second.params.tolist()


def test_without_a_seed_no_two_runs_are_alike(tmp_path: Path) -> None:
    first, second = (
        simulate(load_config([*SMALL, f"output_dir={tmp_path / name}"])).checkpoint for name in ("first", "second")
    )
    assert first.params.tolist() != second.params.tolist()


SAMPLINGS = {
    "fixed": (["sampling.kind=fixed", "privacy.accountant=rdp"], {5}),
    "everyone": (["sampling.kind=everyone"], {10}),
}


@pytest.mark.parametrize(("words", "sizes"), SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_each_way_of_sampling_draws_the_cohort_that_is_accounted(
    words: list[str], sizes: set[int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    noise = ["privacy.user.noise_multiplier=2", "sampling.probability=0.5", "rounds=3"]
    simulate(load_config([*SMALL, *noise, *words, f"output_dir={folder}"]))
    rows = RunFolder(folder).read_metrics()
    assert {row["cohort"] for row in rows} == sizes
    event = RunFolder(folder).ledger(RunFolder(folder).read_config()).releases()[0].event
    assert ("sampled_without_replacement" in event) == ("sampling.kind=fixed" in words)
    assert "poisson" not in event


def test_a_fixed_size_cohort_is_not_accounted_by_pld() -> None:
    done = command("sampling.kind=fixed")
    assert done.returncode == 2
    assert done.stderr.strip() == "discreet: privacy.accountant must be rdp with sampling.kind=fixed (got pld)"
