"""Mechanisms and server optimizers from outside Discreet: a run folder keeps their name and the
values of their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from discreet.settings.rules import require

# what a run folder and a message can hold
OwnNumbers = dict[str, float | int | bool | str]


def own_name(value: object) -> str:
    """The name of the class of a value, as settings have it: package.module:Class."""
    kind = type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def kept_numbers(numbers: Mapping[str, Any], argument: str) -> OwnNumbers | None:
    """The values of fields, None without any. ConfigError, with the name of the argument whose
    fields they are: one can't be kept."""
    rule = "a number, a text, or True or False: the run folder keeps it"
    for name, value in numbers.items():
        require(isinstance(value, int | float | str), f"{argument}.{name}", rule, value)
    return dict(numbers) or None


def check_fields(
    numbers: Collection[str], kind: Any, key: str, *, apart: Collection[str] = ()
) -> None:
    """Raises ConfigError about the setting `key` unless the numbers name fields of a dataclass.
    `apart`: its fields that a run sets."""
    known = [each.name for each in fields(kind) if each.name not in apart]
    unknown = sorted(set(numbers).difference(known))
    rule = f"by the names of its fields, {', '.join(known)}"
    require(not unknown, key, rule, ", ".join(unknown))
