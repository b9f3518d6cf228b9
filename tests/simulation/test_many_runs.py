"""Many runs in a row: what is counted, said, and refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from discreet.cli import sweep as cli
from discreet.server.plan import planned
from discreet.server.run_folder import RunFolder, read_status
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, described
from discreet.simulation.many_runs import Job, check_parallel
from tests.command import simulate as simulate_command

SMALL = ("rounds=1", "data.num_clients=10", "model.name=logistic_regression", "training.epochs=1", "seed=5501")


def test_a_run_that_fails_is_said_at_the_end_and_repeated_by_the_line_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate = cli.simulate

    def failing(config: Settings, **more: object) -> None:
        simulate(config, **more)  # type: ignore[arg-type]
        if config.server.learning_rate == 1:
            raise OSError("no space left")

    there = f"hydra.sweep.dir={tmp_path}"
    with monkeypatch.context() as patch:
        patch.setattr(cli, "simulate", failing)
        assert simulate_command(["--multirun", *SMALL, "server.learning_rate=0.5,1,2", there]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "run 3 of 3 (server.learning_rate=2) has ended: 3 of 3 runs, 1 failed" in said
    assert said[-3:] == [
        "1 of 3 runs failed:",
        "  run 2 of 3 (server.learning_rate=1): OSError: no space left",
        f"to repeat them: discreet simulate --multirun resume=true {there}",
    ]
    assert simulate_command(["--multirun", "resume=true", there]) == 0


def lost(_: Settings) -> None:
    raise RuntimeError("lost")


def test_the_files_of_a_run_that_failed_say_so(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path), load_config([*SMALL, f"output_dir={tmp_path}"])
    folder.write_config(described(config))
    assert Job("run", folder, planned(config), partial(lost, config)).attempt() == "RuntimeError: lost"
    status = read_status(folder)
    assert status is not None
    assert (status.state, status.reason) == ("interrupted", "RuntimeError: lost")


@pytest.mark.parametrize("words", [["--jobs", "2"], ["--jobs=2", "rounds=1"]])
def test_jobs_are_of_a_sweep(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_command(words) == 2
    assert capsys.readouterr().err == "discreet: --jobs is of a sweep: --multirun, with lists of values\n"


def test_a_launcher_of_hydra_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^hydra/launcher=basic is not of a sweep: .*--jobs N"):
        cli.sweep_of(["hydra/launcher=basic", "seed=1,2", f"hydra.sweep.dir={tmp_path}"], multirun=True)


def test_runs_of_one_sweep_share_one_cluster() -> None:
    with pytest.raises(ConfigError, match=r"ray\.address must be the same"):
        check_parallel([planned(load_config([f"ray.address={where}"])) for where in ("auto", "null")])


def test_a_run_on_a_gpu_has_to_ask_for_it() -> None:
    check_parallel([planned(load_config(["device=cuda", "ray.num_gpus=0.5"]))])
    with pytest.raises(ConfigError, match=r"needs ray\.num_gpus"):
        check_parallel([planned(load_config(["device=cuda"]))])


def test_a_sweep_goes_on_on_another_cluster(tmp_path: Path) -> None:
    there = f"hydra.sweep.dir={tmp_path}"
    sweep = cli.sweep_of(["seed=1,2", "ray.address=auto", there], multirun=True)
    assert sweep is not None
    sweep.save()
    again = cli.sweep_of(["resume=true", "ray.address=head:6379", there], multirun=True)
    assert again is not None
    assert again.runs == (("seed=1", "ray.address=head:6379"), ("seed=2", "ray.address=head:6379"))
