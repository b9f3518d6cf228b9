"""Flower's commands with the replacements: `python -m discreet.deployment.flower_fixes.commands COMMAND WORDS...`

COMMAND is superlink, supernode, serverapp or clients. A replacement is imported here and nowhere else, when its command
starts: if Flower has lost a name that it needs, Flower's own behaviour stays, as for a changed source.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from discreet.deployment.flower_fixes.applies import step_aside


def command(name: str, *words: str) -> list[str]:
    """The command line of a COMMAND."""
    return [sys.executable, "-m", __name__, name, *words]


def clients_command(path: Path) -> list[str]:
    """What starts `warm_clients`, listening at `path`. OpenBLAS starts no thread, whose locks a fork would leave."""
    return ["env", "OPENBLAS_NUM_THREADS=1", *command("clients", "--socket", str(path))]


def make(*replacements: str) -> None:
    """Makes replacements, each `module.function` of this folder, but those for which Flower lacks a name."""
    for each in replacements:
        name, function = each.split(".")
        try:
            module = import_module(f"{__package__}.{name}")
        except (ImportError, AttributeError) as error:
            step_aside(name, str(error))
        else:
            getattr(module, function)()


def _superlink() -> None:
    from flwr.superlink.cli import flower_superlink

    make("patient_superlink.be_patient", "small_superlink.be_small", "unread_messages.forget_unread_messages")
    make("failed_runs.say_how_runs_fail", "object_pauses.start_server_apps_patiently")
    gc.freeze()  # what was imported stays: a search for garbage need not look through it
    flower_superlink()


def _supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    make("refused_nodes.say_why", "patient_supernode.be_patient", "object_pauses.look_for_objects_soon")
    flower_supernode()
    # A SuperNode that is told to end exits by itself: this one has failed, and a thread of Flower's would keep it.
    sys.stdout.flush()
    os._exit(1)


def _serverapp() -> None:
    from flwr.superlink.cli import flwr_serverapp

    make("object_pauses.look_for_objects_soon")
    flwr_serverapp()


def _clients() -> None:
    make("warm_clients.main")


COMMANDS: dict[str, Callable[[], None]] = {
    "superlink": _superlink,
    "supernode": _supernode,
    "serverapp": _serverapp,
    "clients": _clients,
}

if __name__ == "__main__":
    # Flower's parsers see the words that follow.
    COMMANDS[sys.argv.pop(1)]()
