"""Who ends a sweep of several runs at a time finds runs that go on, and no process left."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

pytest.importorskip("ray")

from discreet.deployment.local_federation import RUN_SECONDS, wait_until
from discreet.server.run_folder import RunFolder
from tests.deployment.test_interruption import LONG, SMALL, start
from tests.scripts.living import check_interrupted, marked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_sweep_of_several_runs_at_a_time_that_is_ended_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    sweep, mark = tmp_path / "sweep", uuid.uuid4().hex
    words = ["--multirun", "--jobs", "2", *SMALL, LONG, "seed=1,2,3", f"hydra.sweep.dir={sweep}"]
    process = start(mark, *words)
    folders = [RunFolder(sweep / name) for name in "01"]
    wait_until(
        lambda: all(len(folder.read_metrics()) >= 2 for folder in folders) or process.poll() is not None,
        RUN_SECONDS,
        "two runs have done two rounds",
    )
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends it to all processes of the command
    else:
        process.send_signal(number)
    said, errors = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode, errors) == (128 + number, "")
    assert marked(mark) == []
    for folder in folders:
        check_interrupted(folder, f"ended by {number.name}")
    assert not (sweep / "2").exists()
    go_on = f"discreet simulate --multirun --jobs 2 resume=true hydra.sweep.dir={sweep}"
    assert said.splitlines()[-1] == f"interrupted (ended by {number.name}); to go on: {go_on}"
