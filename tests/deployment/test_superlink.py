"""The SuperLink that other organisations connect to: what ends it, and what does not."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager

from discreet.deployment.flower_home import CONNECTION, wait_until
from discreet.deployment.local_federation import START_SECONDS, Federation, empty_federation
from discreet.deployment.superlink import SERVER_APP
from discreet.simulation.processes import STARTER, child_processes
from tests.deployment.ends import RUN_SECONDS

pytestmark = pytest.mark.processes


def test_flowers_superlink_ends_with_the_process_that_started_it_even_by_kill_9(
    tmp_path: Path,
) -> None:
    with empty_federation(tmp_path, []) as federation:
        process = federation.processes["superlink"]
        started = child_processes(process.pid)
        process.kill()
        assert process.wait(START_SECONDS) == -signal.SIGKILL
        wait_until(
            lambda: not {*started} & {*child_processes(0)},
            START_SECONDS,
            "all that came of it has ended",
        )


@pytest.mark.slow
def test_a_superlink_is_not_ready_when_another_one_answers_on_its_port(tmp_path: Path) -> None:
    ready = tmp_path / "other-ready"
    with empty_federation(tmp_path, []) as federation:
        words = [
            "--secrets",
            str(federation.secrets),
            "--state",
            str(tmp_path / "other"),
            "--ready",
            str(ready),
        ]
        module = [sys.executable, "-m", "discreet.deployment.superlink"]
        second = federation.start("second", [*module, *words, "--port", str(federation.port)])
        assert second.wait(START_SECONDS) == 1
        assert "the SuperLink did not start" in federation.says("second")
        assert not ready.exists()


@pytest.mark.slow
def test_a_superlink_that_starts_no_more_runs_ends_so_that_it_is_started_again(
    tmp_path: Path,
) -> None:
    with empty_federation(tmp_path, []) as federation:
        process = federation.processes["superlink"]
        (starter,) = child_processes(process.pid, STARTER)
        assert child_processes(process.pid, SERVER_APP) == []
        os.kill(starter, signal.SIGKILL)
        wait_until(lambda: process.poll() is not None, START_SECONDS, "the SuperLink has ended")
        assert process.returncode > 0
        assert "no run can start any more" in federation.says("superlink")


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, int]]:
    """A SuperLink that was killed while a ServerApp was at work, and that run: it has come back
    since."""
    folder = tmp_path_factory.mktemp("superlink")
    (folder / "state").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower's settings of alembic
        link = LinkState(folder / "state" / "superlink.db")
    link.path.chmod(0o644)
    (run,) = link.state.get_run_info(run_ids=[link.run])
    assert run.primary_task_id is not None
    assert link.state.claim_task(run.primary_task_id)
    assert link.state.activate_task(run.primary_task_id)
    link.state.query("UPDATE task SET active_until = '2026-01-01 00:00:00'")
    with empty_federation(folder, []) as federation:
        yield federation, link.run


def test_a_state_database_that_everybody_could_read_is_its_owners_alone(
    superlink: tuple[Federation, int],
) -> None:
    files = [*(superlink[0].folder / "state").glob("superlink.db*")]
    assert {path.name: path.stat().st_mode & 0o77 for path in files} == dict.fromkeys(
        (path.name for path in files), 0
    )
    assert len(files) >= 1


def test_the_log_of_a_run_with_a_killed_server_app_ends_with_what_to_do_and_code_1(
    superlink: tuple[Federation, int],
) -> None:
    federation, run = superlink
    assert (
        federation.start("flwr-log", ["flwr", "log", str(run), CONNECTION]).wait(START_SECONDS) == 1
    )
    said = federation.says("flwr-log")
    assert f"discreet: run {run} has failed (No heartbeat received from the task)." in said
    assert "is resumed by resume=true output_dir=FOLDER" in said


@pytest.mark.slow
def test_a_run_that_is_refused_ends_flwr_run_with_one_line_and_exit_code_1(
    superlink: tuple[Federation, int],
) -> None:
    federation, _ = superlink
    folder = federation.run("refused", "resume=true")
    assert federation.processes["run-refused"].wait(RUN_SECONDS) == 1
    said = federation.says("run-refused")
    assert re.findall("(?m)^discreet: (?!run )(.*)$", said) == [
        f"{folder.path} does not contain a run: config.yaml is missing"
    ]
    assert "has failed (the reason is above)" in said
    assert "unhandled" not in said
    assert "Traceback" not in said


class LinkState:
    """The state, the store of objects in the same file, and a run that nobody has started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = SqlObjectStore(str(path))
        self.store.initialize()
        self.state = SqlLinkState(str(path), NoOpFederationManager(), self.store)
        self.state.initialize()
        words = {"fab_id": None, "fab_version": None, "fab_hash": None, "override_config": {}}
        more = {"federation_id": NOOP_FEDERATION_ID, "federation_config": None, "flwr_aid": None}
        self.run = self.state.create_run(**words, **more, primary_task_type=TaskType.SERVER_APP)
