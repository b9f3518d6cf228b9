"""However a run or a sweep ends, nothing of the Ray cluster that it started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("ray")

from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import RUN_SECONDS
from discreet.server.run_folder import RunFolder
from tests.scripts.living import LONG, MARK, SMALL, check_interrupted, marked, start

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 60.0
DRIVER = """
import os
import time
from pathlib import Path
import ray
from discreet.deployment.interruption import ending
from discreet.simulation.ray_cluster import connected

def busy(file):
    Path(file).touch()
    time.sleep(600)

with ending(lambda reason: "told"), connected(None):
    task = ray.remote(num_cpus=1)(busy).remote("begun")
    while not Path("begun").exists():
        time.sleep(0.1)
    print(os.environ["DISCREET_SCRATCH"], flush=True)
    ray.get(task)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_of_a_cluster_outlives_the_run_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: tmp_path.name}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().rstrip())
        assert (folder / "ray").is_dir()
        assert len(marked(tmp_path.name)) > 2
        driver.send_signal(number)
        assert driver.wait(SECONDS) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + SECONDS
    while marked(tmp_path.name) or folder.exists():
        assert time.monotonic() < deadline, "processes of the cluster are left, or its folder"
        time.sleep(0.1)


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
    go_on = f"discreet simulate --multirun resume=true hydra.sweep.dir={sweep} --jobs 2"
    assert said.splitlines()[-1] == f"interrupted (ended by {number.name}); to go on: {go_on}"
