"""What settings require of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from discreet.settings.rules import ConfigError, check_all, require
from discreet.settings.wording import Key, Phrase, Wording, joined


def values_by_key(settings: Any) -> dict[str, object]:
    """The values of a section and of its nested sections by their full keys."""
    found: dict[str, object] = {}
    for name in (each.name for each in fields(settings)):
        value = getattr(settings, name)
        if hasattr(value, "key_of"):
            found |= values_by_key(value)
        else:
            found |= {type(settings).key_of(name): value}
    return found


def require_each(settings: Any, by: Phrase, wanted: Mapping[str, tuple[object, str]]) -> None:
    """Raises ConfigError, with a line for each that differs, unless the settings with these keys
    have the value, or one of the values, that `by` requires, for the given reasons."""
    values = values_by_key(settings)
    check_all(
        *(partial(_require_value, key, values[key], by, *needed) for key, needed in wanted.items())
    )


def _require_value(key: str, value: object, by: Phrase, allowed: object, why: str) -> None:
    if isinstance(allowed, tuple):
        several = allowed
    else:
        several = (allowed,)
    names = ["omitted" if value is None else str(value).lower() for value in several]
    words = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    require(value in several, key, Wording(f"{words} with ", by, f": {why}"), value)


def require_one(
    given: Mapping[str, object], advice: str = ": give one of them; the other follows from it"
) -> None:
    """Raises ConfigError unless exactly one of two settings, by their keys, is not None."""
    missing = [value is None for value in given.values()]
    if sum(missing) != 1:
        if all(missing):
            there = "missing"
        else:
            there = "given"
        raise ConfigError(Wording(joined(" and ", map(Key, given)), f" are both {there}{advice}"))
