"""Replacements of Flower's behaviour, which `commands` makes when it starts Flower's commands: docs/flower_fixes.md."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import Any

SWITCH = "DISCREET_FLOWER_FIXES"
NAMES = (
    *("database", "content_garbage", "unread_messages", "failed_runs"),
    *("supernode_replies", "supernode_pauses", "refused_nodes", "warm_clients"),
)
VERSIONS = ("1.41.0", "1.42.0")  # of Flower: what is replaced is the same in both
LONGEST_PAUSE = "DISCREET_LONGEST_PAUSE"  # the variable that names a node's longest pause
SHORTEST_SECONDS, FLOWERS_SECONDS = 0.5, 3.0  # of a node's pause between two looks for a message; Flower's always

# By the name of a replacement: owner and name of what is replaced, and what takes its place.
Fixes = dict[str, tuple[tuple[Any, str, object], ...]]

logger = logging.getLogger("discreet.flower_fixes")


def wanted() -> set[str]:
    """The names of the replacements to be made: none, with a warning, if Flower is another one.

    Raises:
      ValueError: DISCREET_FLOWER_FIXES names something else than a replacement.
    """
    off = {*os.environ.get(SWITCH, "").split()}
    if not off <= {"-all", *(f"-{name}" for name in NAMES)}:
        raise ValueError(f"{SWITCH} takes -all, or some of -{' -'.join(NAMES)} (got {' '.join(off)})")
    version = importlib.metadata.version("flwr")
    if version not in VERSIONS:
        told = "discreet: flwr %s is not %s: Flower's own behaviour stays, see docs/flower_fixes.md"
        logger.warning(told, version, " or ".join(VERSIONS))
    if version not in VERSIONS or "-all" in off:
        return set()
    return {name for name in NAMES if f"-{name}" not in off}
