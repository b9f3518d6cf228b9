"""A cluster is found, checked, and left or ended: nothing of it goes on, and no stranger reaches
it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("ray")
import ray

from discreet.deployment.flower_home import wait_until
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.simulation.processes import RunLostError, child_processes
from discreet.simulation.ray_cluster import RayCluster, connected, versions
from tests.deployment.ends import RUN_SECONDS
from tests.scripts.living import (
    LONG,
    LOOPBACK,
    MARK,
    SMALL,
    check_interrupted,
    default_signals,
    intrude,
    listening,
    marked,
    start,
)

pytestmark = pytest.mark.processes

OWN = ("examples.own.model:build",)
HERE = versions(OWN)
ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 60.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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


@pytest.mark.parametrize("what", HERE)
def test_a_task_does_not_begin_where_something_differs(what: str) -> None:
    assert len(HERE) == 3
    RayCluster(OWN, HERE).check()
    with pytest.raises(
        RunLostError, match=rf"^\S+ has another version of {what}: \S+ there, 0 here$"
    ):
        RayCluster(OWN, {**HERE, what: "0"}).check()


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "head:first"])
def test_an_address_that_names_no_head_is_refused(address: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"^ray\.address must be null"),
        connected(address),
    ):
        pass


@pytest.mark.parametrize("named", ["setting", "RAY_ADDRESS"])
def test_a_cluster_that_is_not_there_is_refused_at_once(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with (
            pytest.raises(ConfigError, match=rf"^ray\.address={address} can't be reached"),
            connected(address if named == "setting" else "auto"),
        ):
            pass


def test_a_signal_that_comes_while_ray_connects_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def take_signals(*_: object, **__: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: exit(number))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "init", take_signals)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(SystemExit), connected(None):
            pass
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


@LINUX
# Ray leaves files of its processes to the collector.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_cluster_listens_to_this_machine_alone_and_runs_no_code_of_a_stranger(
    tmp_path: Path,
) -> None:
    with connected(None):
        ray.get(ray.remote(lambda: None).remote())  # a worker listens, too
        address = ray.get_runtime_context().gcs_address
        found = listening([os.getpid(), *child_processes(os.getpid())])
        assert int(address.rpartition(":")[2]) in {port for _, port in found}
        assert {host for host, _ in found} <= LOOPBACK
        assert "ray.exceptions.AuthenticationError" in intrude(address, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name
)
def test_nothing_of_a_cluster_outlives_the_run_that_started_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: tmp_path.name}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env=environment,
        preexec_fn=default_signals,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        folder = Path(driver.stdout.readline().rstrip())
        assert (folder / "ray").is_dir()
        assert len(marked(tmp_path.name)) > 2
        driver.send_signal(number)
        assert driver.wait(SECONDS) == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(
        lambda: not marked(tmp_path.name) and not folder.exists(),
        SECONDS,
        "all of the cluster is gone",
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_sweep_of_several_runs_at_a_time_that_is_ended_leaves_no_process(
    number: signal.Signals, tmp_path: Path
) -> None:
    sweep, mark = tmp_path / "sweep", uuid.uuid4().hex
    words = ["--multirun", "--jobs", "2", *SMALL, LONG, "seed=1,2,3", f"hydra.sweep.dir={sweep}"]
    process = start(mark, *words)
    folders = [RunFolder(sweep / name) for name in "01"]
    wait_until(
        lambda: (
            all(len(folder.read_metrics()) >= 2 for folder in folders) or process.poll() is not None
        ),
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
    assert said.splitlines()[-1] == f"interrupted (ended by {number.name}); to resume: {go_on}"
