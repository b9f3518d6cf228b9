"""Hands a ClientApp's command line over to `preforked_clients`, and exits with its exit code. It
imports almost nothing, to start quickly."""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET_VARIABLE = "DISCREET_WARM_CLIENTS"
POLICY_VARIABLE = "DISCREET_POLICY"  # set for the processes of a node with a policy
COMMAND = "flwr-clientapp"


def hand_over(path: str, words: list[str]) -> int | None:
    """The exit code of the ClientApp; None if no process took it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
            socket.send_fds(connection, [b"\0"], [0, 1, 2])
            request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            taken = connection.recv(1)
        except OSError:
            return None
        if not taken:
            return None
        code = connection.recv(1)
        # A missing code means that it was killed.
        if code:
            return code[0]
        return 1


if __name__ == "__main__":
    words = sys.argv[1:]
    path = os.environ.get(SOCKET_VARIABLE)
    if path:
        code = hand_over(path, words)
    else:
        code = None
    if code is None:  # runs Flower's own command, the next one of that name on the PATH
        here = os.path.dirname(os.path.realpath(__file__))
        search = os.environ.get("PATH", os.defpath).split(os.pathsep)
        os.environ["PATH"] = os.pathsep.join(
            name for name in search if os.path.realpath(name) != here
        )
        if POLICY_VARIABLE in os.environ:  # Flower's command, which also asks the owner
            commands = "discreet.deployment.flower_fixes.commands"
            os.execv(sys.executable, [sys.executable, "-m", commands, "clientapp", *words])
        os.execvp(COMMAND, [COMMAND, *words])
    sys.exit(code)
