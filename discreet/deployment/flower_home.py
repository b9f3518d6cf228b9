"""Flower's processes on this machine: start, port, environment, and the connection and command line
of `flwr`."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from discreet.run_files.places import app_folder
from discreet.simulation.processes import tied

CONNECTION = "deployment"  # the name of the SuperLink that `flwr` calls
LOOK_SECONDS = 0.1


def free_port() -> int:
    """A free port of the loopback interface. On Linux, as long as this process lasts, only a server
    that sets SO_REUSEADDR can get it, as asyncio's and Python's own do."""
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
    """The environment of Flower's processes: own home, no installation at run time, no
    telemetry."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",  # logs are read as they grow
        "RAY_ADDRESS": "local",  # a separate cluster, whatever else runs on this machine
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns about future changes
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def start(
    command: Sequence[str], log: Path | None, *, folder: Path | None, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this one, even by kill -9, and appends to the log, if there
    is one. It has its own session, so that Ctrl-C reaches only this process."""
    with nullcontext() if log is None else log.open("ab") as output:
        return subprocess.Popen(
            tied(command),
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait_until(
    holds: Callable[[], object], seconds: float, what: str, *, every: float = LOOK_SECONDS
) -> None:
    """Returns as soon as `holds()` is true. Raises TimeoutError, which names `what`, after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(every)


def write_connection(home: Path, *, address: str, authority: Path | None) -> None:
    """Writes Flower's connection file, so that `flwr ... deployment` works with this FLWR_HOME.
    Without an authority there is no TLS."""
    if authority:
        trust = f'root-certificates = "{authority.resolve()}"'
    else:
        trust = "insecure = true"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = '
        f'"{address}"\n{trust}\n'
    )


def flwr_run_command(
    settings: Path, overrides: Sequence[str], app: Path | None = None
) -> list[str]:
    """The command line of `flwr run` for an app (None: that of `app_folder()`); writes its
    overrides to `settings`."""
    # A file, not an argument, as overrides may contain quotes and brackets. A JSON string is a TOML
    # string.
    settings.write_text(f"overrides = {json.dumps(shlex.join(overrides))}\n")
    return [
        "flwr",
        "run",
        str(app or app_folder()),
        CONNECTION,
        "--stream",
        "--run-config",
        str(settings),
    ]
