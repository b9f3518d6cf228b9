"""Starts ClientApps at once: the command `clients`, which `discreet.deployment.supernode` starts by itself.

Flower starts a process for every message. Importing Flower's runtime and PyTorch takes most of that process's time, so
this one imports both, once, and forks for each message: every message still has a process of its own, which ends with
it. No module of the app is loaded beforehand: what runs is the code that came with the run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from flwr.cli.install import install_from_fab
from flwr.common.constant import APP_DIR, FAB_HASH_TRUNCATION
from flwr.supercore.superexec.executor import SubprocessExecutor
from flwr.supercore.utils import get_flwr_home
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
from flwr.supernode.runtime import run_clientapp as clientapps

from discreet.deployment.flower_fixes.commands import applies

# Flower's command, and what ClientApps import, also late: connections, gradients, accounting, ledgers.
LOADED = (
    *("flwr.supernode.cli.flwr_clientapp", "httpcore", "torch", "torch.fx.experimental.symbolic_shapes"),
    *("dp_accounting.pld", "dp_accounting.rdp", "omegaconf", "sqlite3", "Crypto.Protocol.SecretSharing"),
    *("cryptography.hazmat.primitives.asymmetric.x25519", "cryptography.hazmat.primitives.ciphers.aead"),
)
OURS = "discreet"  # forgotten: the bundle of an app brings its own
REPLACED = (SubprocessExecutor.launch, flwr_clientapp, clientapps.run_clientapp, install_from_fab)
EXPECTED = "6c98858d0b65"
LOOK_SECONDS = 1.0


def install_once(fab_file: bytes, install_dir: Path | None = None, skip_prompt: bool = False) -> Path:
    """The folder of an app, which is installed if it is not there; in place of Flower's `install_from_fab`."""
    name = f"*.{hashlib.sha256(fab_file).hexdigest()[:FAB_HASH_TRUNCATION]}"
    installed = (get_flwr_home() / APP_DIR).glob(name)
    return next(installed, None) or install_from_fab(fab_file, install_dir, skip_prompt)


def load() -> None:
    """Imports what ClientApps need."""
    for name in LOADED:
        importlib.import_module(name)
    clientapps.__dict__["install_from_fab"] = install_once
    for name in [name for name in sys.modules if name.split(".")[0] == OURS]:
        del sys.modules[name]


def serve(path: Path) -> None:
    """Forks for each connection, until the process that started this one has ended."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen(128)
        listening.settimeout(LOOK_SECONDS)
        while os.getppid() == parent:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with connection:
                if os.fork() == 0:
                    listening.close()
                    _answer(connection)
    path.unlink(missing_ok=True)


def _answer(connection: socket.socket) -> NoReturn:
    """In a new process: does what Flower's command does, and says how it ended."""
    import numpy as np
    import torch

    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request = _received(connection)
        connection.sendall(b"\1")
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = ["flwr-clientapp", *request["words"]]
        # Copies of generators would draw alike. No noise comes from them: see discreet.privacy.randomness.
        random.seed()
        np.random.seed()
        torch.seed()
        code = _run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code & 0xFF]))
        os._exit(code)


def _received(connection: socket.socket) -> dict[str, Any]:
    connection.settimeout(None)
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with connection.makefile("rb") as file:
        request: dict[str, Any] = json.loads(file.read(int.from_bytes(head, "big")))
    return request


def _run() -> int:
    try:
        flwr_clientapp()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    """Loads, listens at the path that is the command's last word, and serves; returns at once if it does not apply, and
    Flower starts ClientApps itself."""
    if applies("warm_clients", *REPLACED, expected=EXPECTED):
        load()
        serve(Path(sys.argv[-1]))
