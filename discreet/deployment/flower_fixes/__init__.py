"""Replacements of Flower's behaviour, which `commands` makes when it starts Flower's commands: docs/flower_fixes.md."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import logging
import os

SWITCH = "DISCREET_FLOWER_FIXES"
LONGEST_PAUSE = "DISCREET_LONGEST_PAUSE"  # the variable that names a node's longest pause
SHORTEST_SECONDS, FLOWERS_SECONDS = 0.5, 3.0  # of a node's pause between two looks for a message; Flower's always

logger = logging.getLogger("discreet.flower_fixes")


def applies(name: str, *replaced: object, expected: str) -> bool:
    """True if the replacement `name` is to be made: `-name` or `-all` in DISCREET_FLOWER_FIXES switches it off, and if
    Flower is another one, its own behaviour stays, with a warning.

    Args:
      replaced: the functions, classes and constants of Flower that are replaced, or that it relies on.
      expected: their `fingerprint` in the versions that it was written for.
    """
    if {f"-{name}", "-all"} & {*os.environ.get(SWITCH, "").split()}:
        return False
    found = fingerprint(*replaced)
    if found != expected:
        logger.warning(
            "discreet: flwr %s is not what %s is for (fingerprint %s, not %s): Flower's own behaviour stays, see "
            "docs/flower_fixes.md",
            *(importlib.metadata.version("flwr"), name, found, expected),
        )
    return found == expected


def fingerprint(*replaced: object) -> str:
    """Twelve digits that change with the source of a function or a class, and with the value of a constant."""
    texts = [
        inspect.getsource(each) if inspect.isroutine(each) or inspect.isclass(each) else repr(each) for each in replaced
    ]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
