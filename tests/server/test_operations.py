"""Watching a run: its log, its status, its progress, trackers; and that only one server writes
it."""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import re
import shutil
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from rich.ansi import AnsiDecoder
from rich.console import Console

from discreet.cli.status import KILLED, status_facts, status_lines
from discreet.deployment.flower_home import free_port
from discreet.flower.serving import config_of
from discreet.logs import FIELDS, log_to
from discreet.mechanisms.sums import PartialReply
from discreet.protocol.messages import TrainReply
from discreet.run_files.compose import load_asked
from discreet.run_files.opening import only_writer
from discreet.run_files.run_folder import RunFolder, RunStatus, write_status
from discreet.server.progress import Progress
from discreet.server.transport import Failure
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from examples.trackers import prometheus_rounds, tensorboard_rounds

RUN = (
    "rounds=2",
    "data.num_clients=4",
    "sampling.kind=everyone",
    "privacy.user.noise_multiplier=2",
    "seed=71",
)


@pytest.fixture
def written() -> io.StringIO:
    stream = io.StringIO()
    log_to(stream, log_format="json", name="discreet.test")
    return stream


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("run")
    simulate(*load_asked([*RUN, "privacy.user.max_epsilon=9", f"output_dir={folder}"]))
    return RunFolder(folder)


def test_json_lines_hold_the_message_and_its_fields(written: io.StringIO) -> None:
    logging.getLogger("discreet.test").info(
        "round %d", 3, extra={FIELDS: {"epsilon": float("inf"), "round": 3}}
    )
    line = json.loads(written.getvalue())
    assert (line["message"], line["round"], line["epsilon"], line["level"]) == (
        "round 3",
        3,
        "inf",
        "INFO",
    )
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC


def test_the_status_says_what_is_spent_and_left(done: RunFolder) -> None:
    facts = status_facts(done)
    assert (facts["state"], facts["round"], facts["rounds"], facts["nodes"]) == (
        "finished",
        2,
        2,
        4,
    )
    epsilon = facts["epsilon"]
    assert isinstance(epsilon, dict)
    assert epsilon["user"]["spent"] == pytest.approx(done.read_metrics()[-1]["epsilon_user"])
    assert epsilon["user"]["left"] == pytest.approx(9 - epsilon["user"]["spent"])
    assert epsilon["example"] is None
    assert "epsilon    example none (off)" in status_lines(done)


def test_a_folder_that_has_settings_of_an_earlier_version_opens(
    done: RunFolder, tmp_path: Path
) -> None:
    text = (done.path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(
        text.replace("operations:", "operations:\n  metrics_port: 9100") + "tracking: x\n"
    )
    assert RunFolder(tmp_path).read_config() == done.read_config()


def test_a_run_that_says_running_and_has_no_process_was_interrupted(
    done: RunFolder, tmp_path: Path
) -> None:
    shutil.copytree(done.path, tmp_path / "run")
    killed = RunFolder(tmp_path / "run")
    write_status(killed, RunStatus("running", 2))
    with only_writer(killed.path):
        assert status_facts(killed)["state"] == "running"
    assert status_facts(killed)["state"] == "interrupted"
    assert f"state      interrupted: {KILLED}" in status_lines(killed)


def test_a_run_folder_has_one_writer(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from discreet.run_files.opening import only_writer\n"
        "with only_writer(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use"), only_writer(tmp_path, patience=0.0):
            pass
        other.kill()
        other.wait()
        with only_writer(tmp_path, patience=30.0):
            pass


@pytest.mark.processes
def test_of_two_runs_into_one_new_folder_the_later_is_told_that_another_holds_it(
    tmp_path: Path,
) -> None:
    words = ["rounds=2000", "data.num_clients=20", "model.name=linear", "training.epochs=1"]
    words += ["privacy.user.noise_multiplier=0.01", "privacy.user.target_epsilon=null"]
    words.append(f"output_dir={tmp_path / 'run'}")
    command = [sys.executable, "-m", "discreet", "simulate", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as first:
        assert first.stdout is not None
        assert any(b"round 1/2000" in line for line in first.stdout)
        later = subprocess.run(command, capture_output=True, text=True, check=False)
        first.kill()
        first.stdout.read()
    assert later.returncode == 2
    assert "is in use: " in later.stderr + later.stdout
    afterwards = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "resume=true resumes it" in afterwards.stderr + afterwards.stdout


def test_what_the_machine_sets_holds_unless_the_run_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISCREET_OVERRIDES", "experiment=deployment rounds=7")
    context = Context(1, 1, {}, RecordDict(), {"overrides": "rounds=3 output_dir='/a b'"})
    config, call = config_of(context)
    assert (config.rounds, config.data.num_clients, call.output_dir) == (3, 4, "/a b")
    monkeypatch.delenv("DISCREET_OVERRIDES")
    assert config_of(Context(1, 1, {}, RecordDict(), {}))[0].data.num_clients == 200


FEW = (
    "rounds=2",
    "data.num_clients=40",
    "model.name=logistic_regression",
    "training.epochs=1",
    "privacy.user.noise_multiplier=1",
)
TOLD = {"loss", "accuracy", "clip_norm", "fraction_below", "epsilon_user"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float, float]]]:
    """(round, value, time) of everything that TensorBoard has of a run, after the values are those
    of metrics.csv."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path_factory.mktemp("tracked")
    run = tensorboard_rounds.train(str(folder / "logs"), *FEW, f"output_dir={folder / 'run'}")
    rows = RunFolder(run).read_metrics()
    events = EventAccumulator(str(folder / "logs"))
    events.Reload()
    found = {
        name: [(e.step, e.value, e.wall_time) for e in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    for name, points in found.items():
        assert [value for _, value, _ in points] == pytest.approx([row[name] for row in rows])
    return found


def test_what_is_not_covered_by_the_guarantee_does_not_go_out(
    told: dict[str, list[tuple[int, float, float]]],
) -> None:
    assert {*told} == TOLD


def test_a_round_bears_no_time_of_its_own(told: dict[str, list[tuple[int, float, float]]]) -> None:
    assert len({time for points in told.values() for _, _, time in points}) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy"
)  # of SQLAlchemy, which MLflow uses
def test_mlflow_has_the_same_rounds(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from examples.trackers import mlflow_rounds  # loads it, which takes a second

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    rows = RunFolder(
        mlflow_rounds.train(uri, *FEW, f"output_dir={tmp_path / 'run'}")
    ).read_metrics()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (tracked,) = client.search_runs([client.get_experiment_by_name("discreet").experiment_id])
    assert {*tracked.data.metrics} == TOLD
    for name in TOLD:
        history = sorted(
            client.get_metric_history(tracked.info.run_id, name), key=lambda each: each.step
        )
        assert [each.value for each in history] == pytest.approx([row[name] for row in rows])
        assert len({each.timestamp for each in history}) == 1


def test_prometheus_reads_the_last_round(tmp_path: Path) -> None:
    port = free_port()
    run = prometheus_rounds.train(str(port), *FEW, f"output_dir={tmp_path / 'run'}")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = dict(re.findall(r"(?m)^discreet_(\w+) (\S+)$", answer.read().decode()))
    row = RunFolder(run).read_metrics()[-1]
    assert {*found} == {*TOLD, "round"}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: row[name] for name in found}
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_of_progress_counts_clients_of_every_kind() -> None:
    stream = Terminal()
    progress = Progress(stream, 10, clock=itertools.count(0, 10).__next__)
    with progress.shown(4):
        for count in (50, 25):
            several = PartialReply(torch.zeros(1), 0, count - 2, 1.0)
            replies = [TrainReply(1, torch.zeros(1), below=True), Failure(3, "late", ""), several]
            assert [*progress.counted(replies, cohort=50)] == replies
    assert (progress.line.completed, progress.line.fields["clients"]) == (5.5, "25/50")
    assert all(
        word in stream.getvalue() for word in ("round 6/10", "25/50 clients", "clients/s", "left")
    )


class LostTerminal(Terminal):
    """As one whose loss interrupts what is written just then, and all later writing fails."""

    lost = False

    def write(self, text: str) -> int:
        if self.lost:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("interrupted", ["a line of the log", "the display"])
def test_a_signal_is_not_hidden_by_the_loss_of_the_terminal_that_it_tells(
    interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LostTerminal()
    log_to(stream)

    def ask(*_: object) -> None:
        stream.lost = True
        raise KeyboardInterrupt("the signal")

    where = AnsiDecoder.decode_line if interrupted == "a line of the log" else Console.render
    progress = Progress(stream, 10, clock=itertools.count(0, 10).__next__)

    def write() -> None:
        with progress.shown(4):
            monkeypatch.setattr(where.__module__ + "." + where.__qualname__, ask)
            if interrupted == "a line of the log":
                logging.getLogger("discreet").info("one line")
            else:
                [*progress.counted([Failure(3, "late", "")], cohort=50)]
            raise AssertionError("the run goes on")

    with pytest.raises((KeyboardInterrupt, OSError)) as ended:
        write()
    error: BaseException | None = ended.value
    while not isinstance(error, KeyboardInterrupt):
        assert error is not None
        error = error.__context__


def test_a_log_whose_terminal_is_gone_stays_quiet_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = LostTerminal()
    log_to(stream)
    stream.lost = True
    logging.getLogger("discreet").info("one line")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        # as the line that says how to resume: the signal is not raised from it once more
        logging.getLogger("discreet").info("interrupted")
    assert capsys.readouterr() == ("", "")
