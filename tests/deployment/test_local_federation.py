"""The commands that start a whole federation run, small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import Federation
from discreet.server.run_folder import RunFolder, state_of
from discreet.simulation.processes import RunLostError
from tests.deployment.ends import RUN_SECONDS
from tests.scripts.living import MARK, default_signals, marked


def test_a_node_that_ends_at_its_start_is_not_waited_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.start("node-0", [sys.executable, "-c", "print('first'); print('no room'); raise SystemExit(3)"])
    with pytest.raises(RunLostError, match="node-0 has ended with 3 before it was connected; it said last: no room"):
        federation.wait_for_nodes(["node-0"])


@pytest.mark.slow
def test_ctrl_c_ends_every_process_of_a_federation_on_this_machine(tmp_path: Path) -> None:
    run, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    words = ["--nodes", "2", "rounds=500", f"output_dir={run.path}"]
    command = [sys.executable, "-m", "discreet.deployment.local_federation", *words]
    process = subprocess.Popen(
        command, env=os.environ | {MARK: mark}, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    )
    try:
        wait_until(lambda: run.load_checkpoint() or process.poll() is not None, RUN_SECONDS, "a round is done")
        assert len(marked(mark)) > 8
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert marked(mark) == []
    assert state_of(run) == "interrupted"
    go_on = f"to go on: python -m discreet.deployment.local_federation --nodes 2 resume=true output_dir={run.path}"
    assert errors.splitlines()[-1].endswith(go_on)
