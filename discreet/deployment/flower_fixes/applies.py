"""The rule for replacements of Flower's behaviour: each can be switched off, and is for what it was written for."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import logging
import os

logger = logging.getLogger("discreet.flower_fixes")

SWITCH = "DISCREET_FLOWER_FIXES"
NAMES = (
    *("database_patience", "unread_messages", "content_garbage", "database_memory"),
    *("supernode_replies", "supernode_pauses", "object_pauses", "warm_clients", "failed_runs", "refused_nodes"),
)
VERSIONS = ("1.41", "1.42")


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
    step_aside(name, f"{' or '.join(VERSIONS)}, fingerprint {expected}; found {found}")
    return False


def step_aside(name: str, why: str) -> None:
    """Says that the replacement `name` is not made."""
    version = importlib.metadata.version("flwr")
    kept = "Flower's own behaviour stays, see docs/flower_fixes.md"
    logger.warning("discreet: flwr %s is not what %s is for (%s): %s", version, name, why, kept)


def switched_off(words: str) -> set[str]:
    """The replacements that `-name -name` or `-all` switch off.

    >>> sorted(switched_off("-warm_clients -object_pauses"))
    ['object_pauses', 'warm_clients']
    """
    off = {word.removeprefix("-") for word in words.split() if word.startswith("-")}
    wrong = [word for word in words.split() if word.removeprefix("-") not in (*NAMES, "all") or word[0] != "-"]
    if wrong:
        raise ValueError(f"{SWITCH} takes -all or some of {', '.join(f'-{name}' for name in NAMES)} (got {wrong[0]})")
    return set(NAMES) if "all" in off else off


def fingerprint(*replaced: object) -> str:
    """Twelve digits that change with the source of a function or a class, and with the value of a constant."""
    texts = [
        inspect.getsource(each) if inspect.isroutine(each) or inspect.isclass(each) else repr(each) for each in replaced
    ]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
