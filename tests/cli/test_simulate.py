"""The command line of the simulation: Hydra's, with sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.server.plan import plan_of
from discreet.server.run_folder import RunFolder
from discreet.server.state import State
from discreet.server.training_run import TrainingRun
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate
from tests.command import simulate as main

SMALL = ["rounds=1", "data.num_clients=10", "model.name=logistic_regression", "training.epochs=1"]


def sweep(*words: str) -> int:
    return main(["--multirun", *words])


def test_all_runs_of_a_sweep_are_checked_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(f"hydra.sweep.dir={tmp_path}", *SMALL, "model.name=mlp,cnn,lstm") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("discreet: run 3 of 3 (model.name=lstm): model.name: lstm reads text")
    assert not any(tmp_path.iterdir())


def test_a_sweep_goes_on_where_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, draw = [0], TrainingRun.draw_cohort

    def killed_in_round_4(run: TrainingRun, checkpoint: State) -> list[int]:
        drawn[0] += 1
        if drawn[0] == 4:
            raise KeyboardInterrupt
        return draw(run, checkpoint)

    there = f"hydra.sweep.dir={tmp_path / 'a sweep'}"
    monkeypatch.setattr(TrainingRun, "draw_cohort", killed_in_round_4)
    assert sweep(there, *SMALL, "rounds=2", "seed=5501", "privacy.user.noise_multiplier=1,2,4") == 130
    before = [RunFolder(tmp_path / "a sweep" / name).metrics_path for name in "01"]
    lines = [path.read_text().splitlines() for path in before]
    assert list(map(len, lines)) == [3, 2]
    sweep("resume=true", there)
    printed = capsys.readouterr().out
    assert "run 1 of 3 (privacy.user.noise_multiplier=1) has ended already, and is kept" in printed
    assert "run 3 of 3 (privacy.user.noise_multiplier=4)" in printed
    assert [path.read_text().splitlines()[:2] for path in before] == [each[:2] for each in lines]
    folders = [RunFolder(tmp_path / "a sweep" / name) for name in "012"]
    assert [len(folder.read_metrics()) for folder in folders] == [2, 2, 2]
    assert [len(folder.ledger(plan_of(folder.read_config())).releases()) for folder in folders] == [2, 2, 2]


@pytest.mark.parametrize(
    ("words", "sizes"), [(["sampling.kind=fixed", "privacy.accountant=rdp"], {5}), (["sampling.kind=everyone"], {10})]
)
def test_each_way_of_sampling_draws_the_cohort_that_is_accounted(
    words: list[str], sizes: set[int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    noise = ["privacy.user.noise_multiplier=2", "sampling.probability=0.5", "rounds=3", "seed=5501"]
    simulate(load_config([*SMALL, *noise, *words, f"output_dir={folder}"]))
    rows = RunFolder(folder).read_metrics()
    assert {row["cohort"] for row in rows} == sizes
    event = RunFolder(folder).ledger(plan_of(RunFolder(folder).read_config())).releases()[0].event
    assert ("sampled_without_replacement" in event) == ("sampling.kind=fixed" in words)
    assert "poisson" not in event
