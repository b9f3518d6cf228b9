"""What the value of a setting has to be: in words, and as a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from discreet.privacy.quantile import LARGEST_NUMBER, LEAST_NUMBER


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


def list_of(each: Rule, one: str) -> Rule:
    """The rule that a value is a list of numbers, one at least, each of which keeps a rule."""

    def holds(value: object) -> bool:
        numbers = value if isinstance(value, list) else []
        return bool(numbers) and all(isinstance(number, int | float) and each.holds(number) for number in numbers)

    return Rule(f"a list of numbers {each.words}, one a {one}", holds)


# Numbers that float32 bears: a server can't hide a gradient below the smallest float, or behind the largest.
POSITIVE = within(LEAST_NUMBER, LARGEST_NUMBER)
NOT_NEGATIVE = Rule(f"0 or {POSITIVE.words}", lambda value: value == 0 or POSITIVE.holds(value))
FINITE = within(-LARGEST_NUMBER, LARGEST_NUMBER)
OPEN_SHARE = Rule("within (0, 1)", lambda value: 0 < value < 1)
