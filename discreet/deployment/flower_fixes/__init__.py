"""Replacements of Flower's behaviour, which `commands` makes when it starts Flower's commands: docs/flower_fixes.md."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import logging
import os
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

SWITCH = "DISCREET_FLOWER_FIXES"
NAMES = (
    *("database", "content_garbage", "unread_messages", "failed_runs"),
    *("supernode_replies", "supernode_pauses", "refused_nodes", "warm_clients"),
)
VERSIONS = ("1.41", "1.42")
LONGEST_PAUSE = "DISCREET_LONGEST_PAUSE"  # the variable that names a node's longest pause
SHORTEST_SECONDS, FLOWERS_SECONDS = 0.5, 3.0  # of a node's pause between two looks for a message; Flower's always

logger = logging.getLogger("discreet.flower_fixes")


@dataclass(frozen=True)
class Fix:
    """A replacement of Flower's behaviour, in the process that calls `make`.

    Attributes:
      name: in docs/flower_fixes.md and in DISCREET_FLOWER_FIXES.
      written_for: functions, classes and constants of Flower that are replaced, or that it relies on.
      expected: their `fingerprint` in the versions that it was written for.
      places: what is replaced: its owner, its name, and what takes its place.
    """

    name: str
    written_for: tuple[object, ...]
    expected: str
    places: tuple[tuple[Any, str, object], ...] = ()

    def applies(self) -> bool:
        """True if it is to be made. If Flower is another one, its own behaviour stays, with a warning.

        Raises:
          ValueError: DISCREET_FLOWER_FIXES names something else than a replacement.
        """
        if self.name in switched_off(os.environ.get(SWITCH, "")):
            return False
        version, found = importlib.metadata.version("flwr"), fingerprint(*self.written_for)
        if version.rpartition(".")[0] in VERSIONS and found == self.expected:
            return True
        _step_aside(self.name, f"{' or '.join(VERSIONS)}, fingerprint {self.expected}; found {found}")
        return False

    def make(self) -> None:
        """Makes it, if it applies."""
        if self.applies():
            for owner, name, ours in self.places:
                setattr(owner, name, ours)


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


def fix_of(name: str) -> ModuleType | None:
    """A module of this folder; None, with a warning, if Flower has lost a name that it needs."""
    try:
        return import_module(f"{__name__}.{name}")
    except (ImportError, AttributeError) as error:
        _step_aside(name, str(error))
        return None


def _step_aside(name: str, why: str) -> None:
    version = importlib.metadata.version("flwr")
    kept = "Flower's own behaviour stays, see docs/flower_fixes.md"
    logger.warning("discreet: flwr %s is not what %s is for (%s): %s", version, name, why, kept)


def fingerprint(*written_for: object) -> str:
    """Twelve digits that change with the source of a function or a class, and with the value of a constant."""
    texts = [
        inspect.getsource(each) if inspect.isroutine(each) or inspect.isclass(each) else repr(each)
        for each in written_for
    ]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
