"""Somebody else's Flower app, run as its author would: in Flower's simulation, or with SuperNodes as processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from discreet.deployment.flower_home import (
    CONNECTION,
    flower_environment,
    free_port,
    start,
    wait_until,
    write_connection,
)
from discreet.deployment.flower_run import simulation_superlink
from discreet.deployment.healthy import healthy
from discreet.deployment.local_federation import START_SECONDS
from discreet.server.run_folder import RunFolder
from discreet.simulation.processes import scratch_folder

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
RUN_SECONDS = 550


def private_copy(folder: Path) -> Path:
    """A copy of the quickstart with its file server_app_private.py as its server."""
    copied = folder / "app"
    shutil.copytree(QUICKSTART, copied, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    (other,) = copied.rglob("server_app_private.py")
    other.replace(other.with_name("server_app.py"))
    return copied


def run_simulated(app: Path, folder: Path, *, nodes: int, config: str) -> str:
    """The output of the app in Flower's simulation; its ServerApp runs in `folder`."""
    with simulation_superlink(folder) as (address, home, _):
        resources = f"num-supernodes={nodes} client-resources-num-cpus=1"
        return _run(app, home, address, "--federation-config", resources, "--run-config", config)


def run_with_processes(app: Path, folder: Path, *, nodes: int, config: str) -> str:
    """The output of the app with a SuperLink and SuperNodes on loopback; its ServerApp runs in `folder`."""
    with scratch_folder() as home, ExitStack() as held:
        address = f"127.0.0.1:{free_port()}"
        host, port = address.split(":")
        held.enter_context(_process(folder, home, "superlink", ["--insecure", "--host", host, "--port", port]))
        wait_until(lambda: healthy(f"http://{address}/health", authority=None), START_SECONDS, "the SuperLink answers")
        for number in range(nodes):
            place = f"partition-id={number} num-partitions={nodes}"
            words = ["--insecure", "--superlink", address, "--port", str(free_port()), "--node-config", place]
            held.enter_context(_process(folder, home, f"supernode-{number}", words))
        return _run(app, home, address, "--run-config", config)


@contextmanager
def _process(folder: Path, home: Path, name: str, words: list[str]) -> Iterator[None]:
    """One of Flower's processes, until the block ends."""
    command, environment = [f"flower-{name.split('-')[0]}", *words], flower_environment(home)
    process = start(command, folder / f"{name}.log", folder=folder, environment=environment)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _run(app: Path, home: Path, address: str, *words: str) -> str:
    write_connection(home, address=address, authority=None)
    command = [str(Path(sys.executable).with_name("flwr")), "run", str(app), CONNECTION, "--stream", *words]
    with (home / "run.log").open("w") as log:
        done = subprocess.run(
            command, env=flower_environment(home), stdout=log, stderr=log, timeout=RUN_SECONDS, check=False
        )
    said = (home / "run.log").read_text(errors="replace")
    assert done.returncode == 0, said
    return said


def run_folder_of(folder: Path) -> RunFolder:
    """The run folder that a private server left where it ran."""
    (found,) = (folder / "outputs").iterdir()
    return RunFolder(found)
