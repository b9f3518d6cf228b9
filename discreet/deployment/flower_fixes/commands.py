"""Flower's commands with the replacements: `python -m discreet.deployment.flower_fixes.commands COMMAND WORDS...`

COMMAND is superlink, supernode or clients. Each replacement can be switched off, and is for the versions of Flower that
it was written for. It is imported here and nowhere else, when its command starts: if Flower has lost a name that it
needs, Flower's own behaviour stays, as for a changed source.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import inspect
import logging
import os
import sys
from importlib import import_module
from pathlib import Path

logger = logging.getLogger("discreet.flower_fixes")

SWITCH = "DISCREET_FLOWER_FIXES"
NAMES = (
    *("database_patience", "unread_messages", "content_garbage", "database_memory"),
    *("supernode_replies", "supernode_pauses", "warm_clients", "failed_runs", "refused_nodes"),
)
VERSIONS = ("1.41", "1.42")
SHORTEST_SECONDS, FLOWERS_SECONDS = 0.5, 3.0  # of a node's pause between two looks for a message; Flower's always
LONGEST_PAUSE = "DISCREET_LONGEST_PAUSE"  # the variable that names a node's longest pause


def applies(name: str, *replaced: object, expected: str) -> bool:
    """True if the replacement `name` is to be made. If Flower is another one, its own behaviour stays, with a warning.

    Args:
      replaced: the functions, classes and constants of Flower that are replaced, or that it relies on.
      expected: their `fingerprint` in the versions that it was written for.

    Raises:
      ValueError: DISCREET_FLOWER_FIXES names something else than a replacement.
    """
    if name in switched_off(os.environ.get(SWITCH, "")):
        return False
    version, found = importlib.metadata.version("flwr"), fingerprint(*replaced)
    if version.rpartition(".")[0] in VERSIONS and found == expected:
        return True
    _step_aside(name, f"{' or '.join(VERSIONS)}, fingerprint {expected}; found {found}")
    return False


def _step_aside(name: str, why: str) -> None:
    version = importlib.metadata.version("flwr")
    kept = "Flower's own behaviour stays, see docs/flower_fixes.md"
    logger.warning("discreet: flwr %s is not what %s is for (%s): %s", version, name, why, kept)


def switched_off(words: str) -> set[str]:
    """The replacements that `-name -name` or `-all` switch off.

    >>> sorted(switched_off("-warm_clients -failed_runs"))
    ['failed_runs', 'warm_clients']
    """
    known = {f"-{name}": {name} for name in NAMES} | {"-all": {*NAMES}}
    for word in words.split():
        if word not in known:
            raise ValueError(f"{SWITCH} takes -all or some of {', '.join(known)} (got {word})")
    return set().union(*(known[word] for word in words.split()))


def fingerprint(*replaced: object) -> str:
    """Twelve digits that change with the source of a function or a class, and with the value of a constant."""
    texts = [
        inspect.getsource(each) if inspect.isroutine(each) or inspect.isclass(each) else repr(each) for each in replaced
    ]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def make(*replacements: str) -> None:
    """Makes replacements, each `module.function` of this folder, but those for which Flower lacks a name."""
    for each in replacements:
        name, function = each.split(".")
        try:
            module = import_module(f"{__package__}.{name}")
        except (ImportError, AttributeError) as error:
            _step_aside(name, str(error))
        else:
            getattr(module, function)()


def command(name: str, *words: str) -> list[str]:
    """The command line of a COMMAND."""
    return [sys.executable, "-m", __name__, name, *words]


def clients_command(path: Path) -> list[str]:
    """The command line of the preforked clients. OpenBLAS starts no thread, whose locks a fork would leave."""
    return ["env", "OPENBLAS_NUM_THREADS=1", *command("clients", str(path))]


def _superlink() -> None:
    from flwr.superlink.cli import flower_superlink

    make("patient_superlink.be_patient", "small_superlink.be_small", "unread_messages.forget_unread_messages")
    make("failed_runs.say_how_runs_fail")
    gc.freeze()  # what was imported stays: a search for garbage need not look through it
    flower_superlink()


def _supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    make("refused_nodes.say_why", "patient_supernode.be_patient")
    flower_supernode()
    # A SuperNode that is told to end exits by itself: this one has failed, and a thread of Flower's would keep it.
    sys.stdout.flush()
    os._exit(1)


def _clients() -> None:
    make("warm_clients.main")


if __name__ == "__main__":
    # Flower's parsers see the words that follow.
    {"superlink": _superlink, "supernode": _supernode, "clients": _clients}[sys.argv.pop(1)]()
