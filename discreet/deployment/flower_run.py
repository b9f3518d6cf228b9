"""`flwr run . --stream` on a SuperLink of its own: what `discreet run` and `scripts/run` start.

The SuperLink listens on a free port of the loopback interface, with a FLWR_HOME of its own, and both end with the run:
nothing that another run or another project left running can answer instead. Ray, which it starts, listens there alone,
too, with a token.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from discreet.config import ConfigError, RunConfig
from discreet.deployment.healthy import healthy
from discreet.deployment.interruption import override, resumable
from discreet.extras import require
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import OVER, check_output, read_status, state_of, with_output_folder
from discreet.federated.run_lost import RunLostError
from discreet.federated.session import checked
from discreet.logs import log_to
from discreet.places import PACKAGE, app_folder
from discreet.processes import kept, ray_environment, scratch_folder

REPOSITORY = PACKAGE.parent  # where Discreet itself is imported from
MOST_NODES = 200  # a simulation with more clients has several on each node
START_SECONDS, LOOK_SECONDS, LOST_SECONDS = 120, 0.1, 5
LOG = "superlink.log"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on.

    On Linux the system gives it to nobody else as long as this process lasts, not for a connection either; a server
    that sets SO_REUSEADDR gets it, as asyncio's and Python's own do.
    """
    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    port = int(probe.getsockname()[1])
    if sys.platform == "linux":
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.detach()
    else:
        probe.close()
    return port


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: own home, no installation at run time, no calling home."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",  # logs are read as they grow
        "RAY_ADDRESS": "local",  # a cluster of its own, whatever else runs on this machine
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns of its own future
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def simulation_superlink(folder: Path) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """A SuperLink for simulations, started in `folder`; gives its address, its FLWR_HOME and what keeps its processes.

    Every process that came of it ends with the block, or with this process, however that ends, and so does FLWR_HOME.

    Raises:
      RunLostError: it did not start; the message says what it wrote last.
    """
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (
        scratch_folder() as home,
        (home / LOG).open("w") as output,
        _kept(command, home, folder=folder, output=output) as process,
    ):
        deadline = time.monotonic() + START_SECONDS
        while not healthy(f"http://{address}/health", authority=None):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunLostError(f"the SuperLink did not start{_last_line(home)}")
            time.sleep(LOOK_SECONDS)
        yield address, home, process


@contextmanager
def _kept(command: Sequence[str], home: Path, *, folder: Path, output: TextIO) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Flower's below a keeper, in a session of its own: a Ctrl-C comes to this process alone."""
    environment = flower_environment(home) | ray_environment(home)
    process = subprocess.Popen(
        kept(command), cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _last_line(home: Path) -> str:
    lines = (home / LOG).read_text(errors="replace").split("\n")
    return f": {lines[-2].strip()}" if len(lines) > 1 else ""


def nodes_of(config: RunConfig) -> int:
    """How many nodes a simulation of a configuration has; with more clients than that, each is several."""
    return min(config.data.num_clients, MOST_NODES)


def flwr_run(config: RunConfig, overrides: Sequence[str], *, folder: Path) -> int:
    """Runs the app of `app_folder()` on a SuperLink and a FLWR_HOME of its own; streams its log.

    Returns:
      The exit code of `flwr`.

    Raises:
      RunLostError: the SuperLink did not start, or ended before the run.
    """
    with simulation_superlink(folder) as (address, home, superlink):
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "discreet"\n\n[superlink.discreet]\naddress = "{address}"\ninsecure = true\n'
        )
        # A file, not an argument: overrides may hold quotes and brackets. A JSON string is a TOML string.
        (home / "run.toml").write_text(f"overrides = {json.dumps(shlex.join(overrides))}\n")
        command = ["flwr", "run", str(app_folder()), "discreet", "--stream", "--run-config", str(home / "run.toml")]
        command += ["--federation-config", f"num-supernodes={nodes_of(config)} client-resources-num-cpus=1"]
        log = home / "run.log"
        with log.open("w") as output, _kept(command, home, folder=folder, output=output) as run:
            follow(run, log, superlink=superlink)
            return int(run.returncode)


def follow(process: subprocess.Popen[bytes], log: Path, *, superlink: subprocess.Popen[bytes]) -> None:
    """Prints a process's log until its end. The process itself never writes to whoever reads this one's output.

    Raises:
      RunLostError: the SuperLink has ended before it.
    """
    shown, ended = 0, False
    while not ended:
        ended = process.poll() is not None
        text = log.read_text(errors="replace")
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if ended and process.returncode:
            # A lost SuperLink ends `flwr run` too, and may be seen to have ended only after it.
            with suppress(subprocess.TimeoutExpired):
                superlink.wait(LOST_SECONDS)
        if process.returncode != 0 and superlink.poll() is not None:
            raise RunLostError(f"the SuperLink has ended, with exit code {superlink.returncode}")
        time.sleep(LOOK_SECONDS)


def main(words: Sequence[str], *, program: str = "scripts/run") -> int:
    """Checks the overrides and runs. Exit code 0: the run folder is complete; 2: a setting is wrong.

    Args:
      words: Hydra overrides.
      program: what a person types to run it again.
    """
    log_to(sys.stderr)
    try:
        require("ray", extra="simulation", why="Flower's simulation")
        config = with_output_folder(run_config(words))
        folder = check_output(config)
        resolved, _ = checked(config)
        if config.resume:
            folder.check_ledgers(resolved, simulated=True)
    except (ConfigError, LedgerError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    print(f"discreet: starting Flower and Ray takes up to a minute; the run folder is {folder.path}", file=sys.stderr)
    before = read_status(folder)
    with resumable(folder, *program.split()):
        code = flwr_run(config, [*words, override("output_dir", folder.path)], folder=Path.cwd())
        if state_of(folder) == "running":
            raise RunLostError(f"flwr run has ended before the run, with exit code {code}")
    return 0 if state_of(folder) in OVER and read_status(folder) != before else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
