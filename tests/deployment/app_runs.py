"""Somebody else's Flower app, run as its author would: in Flower's simulation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from discreet.deployment.flower_home import CONNECTION, flower_environment, write_connection
from discreet.deployment.flower_run import simulation_superlink
from discreet.server.run_folder import RunFolder

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
    resources = f"num-supernodes={nodes} client-resources-num-cpus=1"
    with simulation_superlink(folder) as (address, home, _):
        write_connection(home, address=address, authority=None)
        flwr, words = Path(sys.executable).with_name("flwr"), ["--federation-config", resources, "--run-config", config]
        with (home / "run.log").open("w") as log:
            command = [str(flwr), "run", str(app), CONNECTION, "--stream", *words]
            environment = flower_environment(home)
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=RUN_SECONDS, check=False)
        said = (home / "run.log").read_text(errors="replace")
    assert done.returncode == 0, said
    return said


def run_folder_of(folder: Path) -> RunFolder:
    """The run folder that a private server left where it ran."""
    (found,) = (folder / "outputs").iterdir()
    return RunFolder(found)
