"""Flower's commands with the replacements: `python -m discreet.deployment.flower_fixes.commands COMMAND WORDS...`

COMMAND is superlink, supernode or clients.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

from discreet.deployment.flower_fixes import wanted


def command(name: str, *words: str) -> list[str]:
    """The command line of a COMMAND."""
    return [sys.executable, "-m", __name__, name, *words]


def clients_command(path: Path) -> list[str]:
    """The command line of the preforked clients. OpenBLAS starts no thread, whose locks a fork would leave."""
    return ["env", "OPENBLAS_NUM_THREADS=1", *command("clients", str(path))]


def make(*modules: str) -> None:
    """Makes the replacements of these modules of this folder. They are not imported beside another Flower."""
    names = wanted()
    for module in modules if names else ():
        for name, places in import_module(f"{__package__}.{module}").FIXES.items():
            for owner, replaced, ours in places if name in names else ():
                setattr(owner, replaced, ours)


if __name__ == "__main__":
    name = sys.argv.pop(1)  # Flower's parsers see the words that follow
    if name == "superlink":
        from flwr.superlink.cli import flower_superlink

        make("small_superlink", "unread_messages", "failed_runs")
        gc.freeze()  # what was imported stays: a search for garbage need not look through it
        flower_superlink()
    elif name == "supernode":
        from flwr.supernode.cli.flower_supernode import flower_supernode

        make("refused_nodes", "supernode_replies", "supernode_pauses")
        flower_supernode()
        # A SuperNode that is told to end exits by itself: this one has failed, and a thread of Flower's would keep it.
        sys.stdout.flush()
        os._exit(1)
    elif "warm_clients" in wanted():  # else Flower starts ClientApps itself
        from discreet.deployment.flower_fixes import preforked_clients

        preforked_clients.load()
        preforked_clients.serve(Path(sys.argv[1]))
