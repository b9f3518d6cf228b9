"""Starts ClientApps without delay: the command `clients`, which `discreet.deployment.supernode`
starts by itself.

Flower starts a process for every message. Importing Flower's runtime and PyTorch takes most of that
process's time, so this one imports both, once, and forks for each message: every message still has
its own process, which ends with it. No module of the app is loaded beforehand, so the code that
runs is the one that came with the run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

from discreet.deployment.flower_fixes import owner_door
from discreet.deployment.flower_fixes.hand_over import POLICY_VARIABLE
from discreet.settings.training import FEATURES
from discreet.simulation.processes import import_before_forking

# Flower's command, and the modules that ClientApps import, also late: connections, gradients,
# accounting, ledgers.
LOADED = (
    "flwr.supernode.cli.flwr_clientapp",
    "httpcore",
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "dp_accounting.pld",
    "dp_accounting.rdp",
    "omegaconf",
    "sqlite3",
    "Crypto.Protocol.SecretSharing",
    "cryptography.hazmat.primitives.asymmetric.x25519",
    "cryptography.hazmat.primitives.ciphers.aead",
)
LOOK_SECONDS = 1.0


def import_libraries() -> None:
    """Imports the modules that ClientApps need."""
    import_before_forking(LOADED)


def serve_clients(path: Path) -> None:
    """Forks for each connection, until the parent process has ended. Cached features of a client's
    examples are kept in a folder beside `path`, which the parent process erases."""
    parent = os.getppid()
    features = path.with_name("features")
    features.mkdir(mode=0o700, exist_ok=True)
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
                    _answer(connection, features)
    path.unlink(missing_ok=True)


def _answer(connection: socket.socket, features: Path) -> NoReturn:
    """In a new process: runs Flower's command, and reports its exit code."""
    import numpy as np
    import torch

    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.settimeout(None)
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        with connection.makefile("rb") as file:
            request = json.load(file)
        connection.sendall(b"\1")
        os.environ.clear()
        os.environ.update(request["environment"], **{FEATURES: str(features)})
        os.chdir(request["folder"])
        sys.argv = ["flwr-clientapp", *request["words"]]
        # Forked copies of a generator would draw the same numbers. Noise does not come from them:
        # see discreet.privacy.randomness.
        random.seed()
        np.random.seed()
        torch.seed()
        if POLICY_VARIABLE in os.environ:
            owner_door.install()
        flwr_clientapp()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        else:
            code = int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(bytes([code & 0xFF]))
        os._exit(code)
