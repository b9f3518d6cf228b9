"""The commands that start a whole federation run, small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import RUN_SECONDS, START_SECONDS, Federation
from discreet.protocol.run_lost import RunLostError
from discreet.server.run_folder import RunFolder
from tests.scripts.living import MARK, default_signals, marked


def test_a_node_that_ends_at_its_start_is_not_waited_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.start("node-0", [sys.executable, "-c", "print('first'); print('no room'); raise SystemExit(3)"])
    with pytest.raises(RunLostError, match="node-0 has ended with 3 before it was connected; it said last: no room"):
        federation.wait_for_nodes(["node-0"])


@contextmanager
def federation_in_training(run: RunFolder, mark: str) -> Iterator[subprocess.Popen[str]]:
    """The command with two nodes, which has done a round; all of its processes carry the mark."""
    words = ["--nodes", "2", "rounds=500", f"output_dir={run.path}"]
    command = [sys.executable, "-m", "discreet.deployment.local_federation", *words]
    process = subprocess.Popen(
        command, env=os.environ | {MARK: mark}, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    )
    try:
        wait_until(lambda: run.load_checkpoint() or process.poll() is not None, RUN_SECONDS, "a round is done")
        assert len(marked(mark)) > 8
        yield process
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_kill_9_of_a_federation_on_this_machine_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    with federation_in_training(RunFolder(tmp_path / "run"), mark) as process:
        process.kill()
        wait_until(lambda: marked(mark) == [], START_SECONDS, "every process has ended")
