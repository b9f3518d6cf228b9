"""A SuperLink with TLS, and with its nodes' keys registered: `python -m
discreet.deployment.superlink`.

It starts Flower's SuperLink, waits until it answers, registers the public keys of a folder, and
ends with it. If this process is killed, Flower's SuperLink ends too. Its state is in a file, and
survives a restart.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from pwd import getpwnam

from discreet.deployment.certificates import register_node
from discreet.deployment.flower_fixes import commands
from discreet.deployment.flower_fixes.told_processes import OPERATORS
from discreet.deployment.flower_home import CONNECTION, start, wait_until, write_connection
from discreet.deployment.healthy import healthy
from discreet.logs import log_to
from discreet.simulation.processes import STARTER, child_processes, heard, listens

logger = logging.getLogger("discreet.superlink")

DATABASE = "superlink.db"
SERVER_APP = b"flwr-serverapp"  # the program of a ServerApp, a descendant of a SuperLink
START_SECONDS = 120.0
LOOK_SECONDS = 0.2
WATCH_SECONDS = 5.0
# With glibc, larger blocks (in bytes) are returned to the system when they are freed. Without this,
# each thread of a SuperLink keeps the memory of the models that it has passed on.
RETURNED_FROM = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
# The sum must be below the 20 s after which docker-compose.yml ends the container.
APPS_SECONDS = 8.0
SIGNAL_SECONDS = 4.0


def _start(arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Starts Flower's SuperLink with TLS, without installation at run time, and with its state
    readable by its owner alone."""
    secrets = arguments.secrets
    database = arguments.state / DATABASE
    arguments.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    database.touch()
    # SQLite creates its side files with the same mode.
    for path in arguments.state.glob(f"{DATABASE}*"):
        path.chmod(0o600)
    command = [
        *commands.command("superlink"),
        "--ssl-ca-certfile",
        str(secrets / "ca.crt"),
        "--ssl-certfile",
        str(secrets / "server.crt"),
        "--ssl-keyfile",
        str(secrets / "server.key"),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--database",
        str(database),
        "--host",
        arguments.host,
        "--port",
        str(arguments.port),
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    operators = " ".join(str(getpwnam(name).pw_uid) for name in arguments.operator)
    # Variables of this process take precedence over RETURNED_FROM.
    environment = RETURNED_FROM | os.environ | {"PATH": path, OPERATORS: operators}
    return start(command, None, folder=None, environment=environment)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the ServerApps, which can still report their progress to the SuperLink, and then the
    SuperLink itself, which would otherwise wait for readers of a run's log."""
    apps = child_processes(process.pid, SERVER_APP)
    for pid in apps:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    with suppress(TimeoutError):
        wait_until(
            lambda: {*apps}.isdisjoint(child_processes(process.pid, SERVER_APP)),
            APPS_SECONDS,
            "ServerApps have ended",
        )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SIGNAL_SECONDS)
            return


def main(words: Sequence[str]) -> int:
    """Runs until the SuperLink ends or this process is told to end; returns the SuperLink's exit
    code, or 0 if it was told to end."""
    arguments = _parser().parse_args(words)
    log_to(sys.stdout)
    if arguments.ready:
        arguments.ready.unlink(missing_ok=True)
    asked = threading.Event()
    for number in heard():
        signal.signal(number, lambda *_: asked.set())
    process = _start(arguments)
    try:
        if _answers(process, asked, port=arguments.port, authority=arguments.secrets / "ca.crt"):
            _register(arguments)
            _watch(process, asked)
        else:
            logger.error("the SuperLink did not start")
    finally:
        if process.poll() is None:
            end(process)
    if asked.is_set():
        return 0
    return process.returncode or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m discreet.deployment.superlink", description=__doc__
    )
    parser.add_argument(
        "--secrets", type=Path, default=Path("secrets"), help="holds ca.crt, server.crt, server.key"
    )
    parser.add_argument(
        "--keys", type=Path, help="public keys of nodes, NAME.pub (default: SECRETS/public)"
    )
    parser.add_argument(
        "--state", type=Path, default=Path(), help="where the SuperLink keeps its state"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--operator",
        action="append",
        default=[],
        help="a further user of this machine who may start runs",
    )
    parser.add_argument(
        "--ready", type=Path, help="a file that is made when all keys are known, for a healthcheck"
    )
    return parser


def _watch(process: subprocess.Popen[bytes], asked: threading.Event) -> None:
    """Returns once the SuperLink or its starter of runs has ended, or this process is asked to
    end."""
    started = child_processes(process.pid, STARTER)
    while process.poll() is None and not asked.wait(WATCH_SECONDS):
        if started and not child_processes(process.pid, STARTER):
            # Without its starter the SuperLink would accept runs and start none, so this process
            # ends and is restarted from outside.
            logger.error(
                "the SuperLink's %s has ended: no run can start any more", STARTER.decode()
            )
            return


def _answers(
    process: subprocess.Popen[bytes], asked: threading.Event, *, port: int, authority: Path
) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline and not asked.wait(LOOK_SECONDS):
        # A left-over SuperLink on the same port would answer too, until this one fails on the used
        # port.
        if listens(process.pid, port) and healthy(
            f"https://127.0.0.1:{port}/health", authority=authority
        ):
            return True
    return False


def _register(arguments: argparse.Namespace) -> None:
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    write_connection(
        home, address=f"127.0.0.1:{arguments.port}", authority=arguments.secrets / "ca.crt"
    )
    for public_key in sorted((arguments.keys or arguments.secrets / "public").glob("*.pub")):
        new = register_node(public_key, connection=CONNECTION)
        logger.info(
            "%s the node key %s", "registered" if new else "known already:", public_key.name
        )
    if arguments.ready:
        arguments.ready.touch()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
