"""Flower's commands with the patches: `python -m discreet.deployment.flower_fixes.commands COMMAND
WORDS...`

COMMAND is superlink, supernode, guarded (its first word is a guard.toml), clients, or clientapp at
a node with a policy.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from importlib import import_module
from pathlib import Path

from discreet.flower.tested_flower import VERSIONS, flower_version
from discreet.logs import log_to

SWITCH = "DISCREET_FLOWER_FIXES"
NAMES = (
    "database",
    "content_garbage",
    "unread_messages",
    "failed_runs",
    "local_callers",
    "supernode_replies",
    "supernode_pauses",
    "refused_nodes",
    "warm_clients",
)

logger = logging.getLogger("discreet.flower_fixes")


def wanted() -> set[str]:
    """The names of the patches to apply: none, with a warning, for another version of Flower.
    Raises ValueError: DISCREET_FLOWER_FIXES names something that is not a patch."""
    off = {*os.environ.get(SWITCH, "").split()}
    if not off <= {"-all", *(f"-{name}" for name in NAMES)}:
        raise ValueError(
            f"{SWITCH} takes -all, or some of -{' -'.join(NAMES)} (got {' '.join(off)})"
        )
    version = flower_version()
    if version not in VERSIONS:
        told = "discreet: flwr %s is not %s: Flower's own behaviour stays, see docs/flower_fixes.md"
        logger.warning(told, version, " or ".join(VERSIONS))
        return set()
    if "-all" in off:
        return set()
    return {name for name in NAMES if f"-{name}" not in off}


def command(name: str, *words: str) -> list[str]:
    """The command line of a COMMAND."""
    return [sys.executable, "-m", __name__, name, *words]


def clients_command(path: Path) -> list[str]:
    """The command line of the preforked clients. OpenBLAS must not start threads, whose locks would
    stay held after a fork."""
    return ["env", "OPENBLAS_NUM_THREADS=1", *command("clients", str(path))]


def make(module: str) -> None:
    """Applies the patches of a module of this folder, which is not imported with another version of
    Flower."""
    if names := wanted():
        for name, places in import_module(f"{__package__}.{module}").FIXES.items():
            for owner, replaced, ours in places if name in names else ():
                setattr(owner, replaced, ours)


if __name__ == "__main__":
    name = sys.argv.pop(1)  # Flower's parsers see the words that follow
    if name == "superlink":
        from flwr.superlink.cli import flower_superlink

        make("superlink_fixes")
        gc.freeze()  # imported objects stay, so garbage collection can skip them
        flower_superlink()
    elif name in ("supernode", "guarded"):
        from flwr.supernode.cli.flower_supernode import flower_supernode

        make("supernode_fixes")
        if name == "guarded":
            from discreet.deployment.flower_fixes import supernode_guard

            log_to(sys.stdout)
            supernode_guard.install(Path(sys.argv.pop(1)))
        flower_supernode()
        # A SuperNode that is told to end exits by itself. This one has failed, and a thread of
        # Flower would keep it alive.
        sys.stdout.flush()
        os._exit(1)
    elif name == "clientapp":
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

        from discreet.deployment.flower_fixes import owner_door

        owner_door.install()
        flwr_clientapp()
    elif "warm_clients" in wanted():  # otherwise Flower starts ClientApps itself
        from discreet.deployment.flower_fixes import preforked_clients

        preforked_clients.import_libraries()
        preforked_clients.serve_clients(Path(sys.argv[1]))
