"""What the value of a setting has to be: in words, and as a test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a setting has to be, in words and as a test of its value; `names` are proposed for a misspelt one."""

    words: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()


def one_of(*names: str) -> Rule:
    """The rule that a value is one of the names."""
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names)


def at_least(least: int) -> Rule:
    """The rule that a whole number is not too small."""
    return Rule(f"at least {least}", lambda value: least <= value)


def within(least: float, largest: float) -> Rule:
    """The rule that a number lies in a closed interval."""
    return Rule(f"within [{least:g}, {largest:g}]", lambda value: least <= value <= largest)


POSITIVE = Rule("a finite number above 0", lambda value: 0 < value < math.inf)
OPEN_SHARE = Rule("within (0, 1)", lambda value: 0 < value < 1)
