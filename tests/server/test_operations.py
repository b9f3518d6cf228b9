"""Watching a run: its log, its status; and that only one server writes it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from discreet.cli.status import status_facts, status_lines
from discreet.flower.serving import config_of
from discreet.logs import FIELDS, log_to
from discreet.server.run_folder import RunFolder, only_writer
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate

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


def test_json_lines_hold_the_message_and_its_fields(written: io.StringIO) -> None:
    logging.getLogger("discreet.test").info("round %d", 3, extra={FIELDS: {"epsilon": float("inf"), "round": 3}})
    line = json.loads(written.getvalue())
    assert (line["message"], line["round"], line["epsilon"], line["level"]) == ("round 3", 3, "inf", "INFO")
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC


def test_the_status_says_what_is_spent_and_left(done: RunFolder) -> None:
    facts = status_facts(done)
    assert (facts["state"], facts["round"], facts["rounds"], facts["nodes"]) == ("finished", 2, 2, 4)
    epsilon = facts["epsilon"]
    assert isinstance(epsilon, dict)
    assert epsilon["user"]["spent"] == pytest.approx(done.read_metrics()[-1]["epsilon_user"])
    assert epsilon["user"]["left"] == pytest.approx(9 - epsilon["user"]["spent"])
    assert epsilon["example"] is None
    assert "epsilon    example none (off)" in status_lines(done)


def test_a_folder_that_has_settings_of_an_earlier_version_opens(done: RunFolder, tmp_path: Path) -> None:
    text = (done.path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(
        text.replace("operations:", "operations:\n  metrics_port: 9100") + "tracking: x\n"
    )
    assert RunFolder(tmp_path).read_config() == done.read_config()


def test_a_run_folder_has_one_writer(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from discreet.server.run_folder import only_writer\n"
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
