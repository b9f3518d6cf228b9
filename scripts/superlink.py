"""A SuperLink with TLS and node authentication on, and its nodes' keys registered: `python -m scripts.superlink`.

It starts `flower-superlink`, waits until it answers, makes the public keys of a folder known to it, and ends with it.
Its state (which nodes are known, which runs there were) is a file, so that it survives a restart.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from discreet.logs import log_to
from scripts.certificates import register_node
from scripts.healthy import healthy

logger = logging.getLogger("discreet.superlink")

CONNECTION = "deployment"
START_SECONDS = 120.0
LOOK_SECONDS = 0.2


def superlink_command(secrets: Path, state: Path, *, host: str, port: int) -> list[str]:
    """The command line: nothing insecure, nothing installed at run time."""
    return [
        "flower-superlink",
        *("--ssl-ca-certfile", str(secrets / "ca.crt")),
        *("--ssl-certfile", str(secrets / "server.crt")),
        *("--ssl-keyfile", str(secrets / "server.key")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *("--database", str(state / "superlink.db")),
        *("--host", host, "--port", str(port)),
    ]


def write_connection(home: Path, *, address: str, authority: Path) -> None:
    """Flower's connection file, so that `flwr ... deployment` works where this runs."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{address}"\nroot-certificates = "{authority.resolve()}"\n'
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.superlink", description=__doc__)
    parser.add_argument("--secrets", type=Path, default=Path("secrets"), help="holds ca.crt, server.crt, server.key")
    parser.add_argument("--keys", type=Path, help="public keys of nodes, NAME.pub (default: SECRETS/public)")
    parser.add_argument("--state", type=Path, default=Path(), help="where the SuperLink keeps its state")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ready", type=Path, help="a file that is made when all keys are known, for a healthcheck")
    return parser


def _wait_until_healthy(process: subprocess.Popen[bytes], *, port: int, authority: Path) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if healthy(f"https://127.0.0.1:{port}/health", authority=authority):
            return True
        time.sleep(LOOK_SECONDS)
    return False


def _register_all(keys: Path) -> None:
    for public_key in sorted(keys.glob("*.pub")):
        if register_node(public_key, connection=CONNECTION):
            logger.info("registered the node key %s", public_key.name)
        else:
            logger.info("the node key %s is known", public_key.name)


def main(words: Sequence[str]) -> int:
    """Runs until the SuperLink ends or this is told to end; gives the SuperLink's exit code."""
    arguments = _parser().parse_args(words)
    log_to(sys.stdout)
    secrets, state = arguments.secrets, arguments.state
    state.mkdir(parents=True, exist_ok=True)
    if arguments.ready:
        arguments.ready.unlink(missing_ok=True)
    command = superlink_command(secrets, state, host=arguments.host, port=arguments.port)
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: process.send_signal(received))
    if not _wait_until_healthy(process, port=arguments.port, authority=secrets / "ca.crt"):
        logger.error("the SuperLink did not start")
        process.terminate()
        return process.wait() or 1
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    write_connection(home, address=f"127.0.0.1:{arguments.port}", authority=secrets / "ca.crt")
    _register_all(arguments.keys or secrets / "public")
    if arguments.ready:
        arguments.ready.touch()
    return process.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
