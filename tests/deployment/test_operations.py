"""Watching a run: its log, its status, its metrics; and that only one server writes it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from prometheus_client import generate_latest

from discreet.cli.status import status_facts, status_lines
from discreet.client_settings import ConfigError
from discreet.config import load_config
from discreet.deployment.flower_home import free_port
from discreet.deployment.healthy import healthy
from discreet.federated.run_folder import METRICS, RunFolder, only_writer
from discreet.federated.serving import config_of
from discreet.federated.telemetry import GAUGES, RunCollector, serving_metrics
from discreet.logs import FIELDS, log_to
from discreet.simulation.in_process import simulate
from discreet.tasks.scores import SCORES
from tests.command import status as status_main

RUN = ("rounds=2", "data.num_clients=4", "sampling.kind=everyone", "privacy.user.noise_multiplier=2", "seed=71")


@pytest.fixture
def written() -> io.StringIO:
    stream = io.StringIO()
    log_to(stream, log_format="json", name="discreet.test")
    return stream


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("run")
    simulate(load_config([*RUN, "privacy.user.max_epsilon=9", f"output_dir={folder}"]))
    return RunFolder(folder)


def test_json_lines_hold_the_message_its_fields_and_an_exception_in_one_line(written: io.StringIO) -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        fields = {FIELDS: {"epsilon": float("inf"), "round": 3}}
        logging.getLogger("discreet.test").exception("round\n%d", 3, extra=fields)
    (line,) = map(json.loads, written.getvalue().splitlines())
    assert (line["message"], line["round"], line["epsilon"], line["level"]) == ("round\n3", 3, "inf", "ERROR")
    assert "ValueError: a\nb" in line["exception"]
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC


def test_the_status_says_what_is_spent_and_left(
    done: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_main([str(done.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == 2
    assert status_main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    facts = status_facts(done)
    assert (facts["state"], facts["round"], facts["rounds"], facts["nodes"]) == ("finished", 2, 2, 4)
    epsilon = facts["epsilon"]
    assert isinstance(epsilon, dict)
    assert epsilon["user"]["spent"] == pytest.approx(done.read_metrics()[-1]["epsilon_user"])
    assert epsilon["user"]["left"] == pytest.approx(9 - epsilon["user"]["spent"])
    assert epsilon["example"] is None
    assert "epsilon    example none (off)" in status_lines(done)


def metrics_of(folder: RunFolder, budget: float | None = None) -> list[str]:
    """The lines that Prometheus reads."""
    return generate_latest(RunCollector(folder, budget)).decode().splitlines()  # type: ignore[arg-type]


def test_metrics_are_what_prometheus_reads(done: RunFolder) -> None:
    lines = metrics_of(done, budget=9.0)
    assert "discreet_round 2.0" in lines
    assert "discreet_replies 4.0" in lines
    assert 'discreet_epsilon{guarantee="local"} +Inf' in lines
    assert 'discreet_epsilon_budget{guarantee="user"} 9.0' in lines
    for line in lines:
        assert line.startswith(("# HELP discreet_", "# TYPE discreet_", "discreet_"))
    named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")} <= named
    assert {"round", "loss", *SCORES, *METRICS} == {*GAUGES, "epsilon_user", "epsilon_example", "epsilon_local"}


def test_metrics_are_served_while_the_run_goes_on_and_not_after_it(done: RunFolder) -> None:
    port = free_port()
    with serving_metrics(done.path, port=port, host="127.0.0.1") as served:
        assert served == port
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert b"discreet_round 2.0" in answer.read()
        assert healthy(f"{url}/metrics", authority=None)
        with serving_metrics(done.path, port=port, host="127.0.0.1") as second:
            assert second is None  # the port is taken, and the run goes on
    assert not healthy(f"{url}/metrics", authority=None)


def test_a_run_folder_has_one_writer(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from discreet.federated.run_folder import only_writer\n"
        "with only_writer(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use"), only_writer(tmp_path, patience=0.0):
            pass
        other.kill()
        other.wait()
        with only_writer(tmp_path, patience=30.0):
            pass


def test_what_the_machine_sets_holds_unless_the_run_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCREET_OVERRIDES", "experiment=deployment rounds=7")
    context = Context(1, 1, {}, RecordDict(), {"overrides": "rounds=3 output_dir='/a b'"})
    config = config_of(context)
    assert (config.rounds, config.data.num_clients, config.output_dir) == (3, 4, "/a b")
    monkeypatch.delenv("DISCREET_OVERRIDES")
    assert config_of(Context(1, 1, {}, RecordDict(), {})).data.num_clients == 200


def test_what_the_machine_sets_changes_no_run_that_is_resumed(done: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCREET_OVERRIDES", "experiment=deployment rounds=7")
    config = config_of(Context(1, 1, {}, RecordDict(), {"overrides": f"resume=true output_dir='{done.path}'"}))
    assert config == replace(done.read_config(), resume=True)
