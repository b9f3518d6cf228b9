"""How a setting is checked: what is wrong is said in one line that names it."""

from __future__ import annotations

import difflib
from dataclasses import field, fields
from typing import Any, TypeVar

from discreet.value_rules import Rule

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
