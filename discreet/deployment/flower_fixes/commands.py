"""Flower's commands with the replacements: `python -m discreet.deployment.flower_fixes.commands COMMAND WORDS...`

COMMAND is superlink, supernode or clients.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from discreet.deployment.flower_fixes import fix_of


def command(name: str, *words: str) -> list[str]:
    """The command line of a COMMAND."""
    return [sys.executable, "-m", __name__, name, *words]


def clients_command(path: Path) -> list[str]:
    """The command line of the preforked clients. OpenBLAS starts no thread, whose locks a fork would leave."""
    return ["env", "OPENBLAS_NUM_THREADS=1", *command("clients", str(path))]


def make(*names: str) -> None:
    """Makes the replacements of these modules, but those for which Flower lacks a name."""
    for module in filter(None, map(fix_of, names)):
        for fix in module.FIXES:
            fix.make()


def _superlink() -> None:
    from flwr.superlink.cli import flower_superlink

    make("small_superlink", "unread_messages", "failed_runs")
    gc.freeze()  # what was imported stays: a search for garbage need not look through it
    flower_superlink()


def _supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    make("refused_nodes", "supernode_replies", "supernode_pauses")
    flower_supernode()
    # A SuperNode that is told to end exits by itself: this one has failed, and a thread of Flower's would keep it.
    sys.stdout.flush()
    os._exit(1)


def _clients() -> None:
    if clients := fix_of("preforked_clients"):
        clients.main(Path(sys.argv[1]))


if __name__ == "__main__":
    # Flower's parsers see the words that follow.
    {"superlink": _superlink, "supernode": _supernode, "clients": _clients}[sys.argv.pop(1)]()
