"""The checks of a setting: its rule, and one line that names the setting if a value breaks the rule."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

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


T = TypeVar("T")


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type, or out of its range. The message is one line that names it."""

    def __init__(self, message: str) -> None:
        super().__init__(message.replace("\n", " "))  # of an error of a library or of somebody's model


def setting(default: T, rule: Rule) -> T:
    """A field of a section, with the rule for its value. If None is the default, None keeps the rule."""
    return field(default=default, metadata={"rule": rule})


def check(section: Any, prefix: str) -> None:
    """Raises ConfigError unless each value of a section keeps its rule; `prefix` begins the names of its settings."""
    for item in fields(section):
        value, rule = getattr(section, item.name), item.metadata.get("rule")
        if rule is not None and not (value is None and item.default is None):
            check_value(value, f"{prefix}{item.name}", rule)


def check_value(value: object, name: str, rule: Rule) -> None:
    """Raises ConfigError unless the value of setting `name` keeps the rule."""
    if not rule.holds(value):
        close = difflib.get_close_matches(str(value), rule.names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        require(False, name, rule.words, repr(value) if value == "" else f"{value}{hint}")


def require(holds: bool, name: str, rule: str, got: object) -> None:
    """Raises ConfigError unless a setting `holds` to its rule."""
    if not holds:
        raise ConfigError(f"{name} must be {rule} (got {got})")


NOISE_OR_TARGET = ("noise_multiplier", "target_epsilon")


FOLLOWS = ": give one, the other follows from it"


def require_one(section: Any, prefix: str, names: tuple[str, str], advice: str = FOLLOWS) -> None:
    """Raises ConfigError unless exactly one of two settings of a section is given."""
    first, second = (getattr(section, name) is not None for name in names)
    if first == second:
        both = " and ".join(f"{prefix}{name}" for name in names)
        raise ConfigError(f"{both} are both {'given' if first else 'missing'}{advice}")


LARGEST_RATE = 1e4  # of a learning rate: far beyond it a model overflows in its first round


LEARNING_RATE = within(LEAST_NUMBER, LARGEST_RATE)


MOMENTUM = Rule("within [0, 1)", lambda value: 0 <= value < 1)


# 0 is refused by the cohort that it gives, and is not read with sampling.kind=everyone.
PROBABILITY = Rule("within (0, 1]", lambda value: 0 <= value <= 1)


SAMPLING = one_of("poisson", "fixed", "everyone")
