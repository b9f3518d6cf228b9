"""Many runs in a row: what is counted, said, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.cli import sweep as cli
from discreet.server.plan import planned
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.many_runs import check_parallel
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


def test_a_sweep_goes_on_on_another_cluster(tmp_path: Path) -> None:
    there = f"hydra.sweep.dir={tmp_path}"
    sweep = cli.sweep_of(["seed=1,2", "ray.address=auto", there], multirun=True)
    assert sweep is not None
    sweep.save()
    again = cli.sweep_of(["resume=true", "ray.address=head:6379", there], multirun=True)
    assert again is not None
    assert again.runs == (("seed=1", "ray.address=head:6379"), ("seed=2", "ray.address=head:6379"))


def test_runs_that_can_not_share_a_cluster_are_refused() -> None:
    check_parallel([planned(load_config(["device=cuda", "ray.num_gpus=0.5"]))])
    with pytest.raises(ConfigError, match=r"ray\.address must be the same"):
        check_parallel([planned(load_config([f"ray.address={where}"])) for where in ("auto", "null")])
    with pytest.raises(ConfigError, match=r"needs ray\.num_gpus"):
        check_parallel([planned(load_config(["device=cuda"]))])
