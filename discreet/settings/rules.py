"""Sections of settings: frozen pydantic dataclasses. What one refuses is a line with the full key, rule and value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, field
from functools import cache, partial
from typing import Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from discreet.settings.ranges import Rule

T = TypeVar("T")
ABSENT = ("mechanism", None)


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type, or out of its range. The message is one line that names it."""

    def __init__(self, message: str) -> None:
        super().__init__(message.replace("\n", " "))  # of an error of a library or of somebody's model


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def section(prefix: str, **elsewhere: str) -> Callable[[type[T]], type[T]]:
    """A decorator that makes a class a frozen pydantic dataclass, whose mistakes are a ConfigError.

    Args:
      prefix: begins the keys of its settings, for instance "privacy.user.".
      elsewhere: the keys of those fields that have another one, for instance `sampling="sampling.kind"`.
    """
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    def made(kind: type[T]) -> type[T]:
        checked: Any = dataclass(frozen=True, config=config)(kind)
        validate = checked.__init__

        def init(self: Any, *args: Any, **values: Any) -> None:
            try:
                validate(self, *args, **values)
            except ValidationError as error:
                raise config_error(error, checked) from error

        checked.__init__, checked.key_of = init, staticmethod(lambda name: elsewhere.get(name, prefix + name))
        return cast(type[T], checked)

    return made


def read_json(kind: type[T], text: str | bytes) -> T:
    """A section, with its sections, of JSON text.

    Raises:
      ConfigError: one line that names the setting that is unknown, of the wrong type, or out of range.
    """
    try:
        return cast(T, _adapter(kind).validate_json(text))
    except ValidationError as error:
        raise config_error(error, kind) from error


def write_json(value: Any) -> str:
    """The JSON text of a section: the same for equal sections. A mechanism that is not given is left out."""
    return json.dumps(asdict(value, dict_factory=lambda fields: {k: v for k, v in fields if (k, v) != ABSENT}))


def rules(kind: Any) -> Iterator[tuple[str, Rule | None]]:
    """Every setting of a section and of its sections by its full key, with its rule."""
    for name, annotation in _annotations(kind).items():
        if inner := _section_in(annotation):
            yield from rules(inner)
        else:
            yield kind.key_of(name), _rule_of(annotation)


def config_error(error: ValidationError, kind: Any) -> ConfigError:
    """The first thing that is wrong with a section, in one line with the setting's full key, its rule and the value."""
    first = error.errors(include_url=False)[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), ConfigError):  # of a `__post_init__`
        return cause
    if not first["loc"]:
        return ConfigError(first["msg"])
    key, annotation = "", kind
    for name in map(str, first["loc"]):
        outer = _section_in(annotation)
        if outer is None:  # in a list, or in one of two types
            break
        key, annotation = outer.key_of(name), _annotations(outer).get(name)
    if first["type"] == "unexpected_keyword_argument":
        return ConfigError(unknown(key, kind))
    if first["type"] == "missing":
        return ConfigError(f"{key} must be given")
    rule, words = _rule_of(annotation), TYPES.get(first["type"], "")
    if rule is None:
        return ConfigError(f"{key} must be {words or first['msg']} (got {_shown(first['input'])})")
    if words and rule.words.startswith(("at least", "within", "0 or")):
        rule = Rule(f"{words}, {rule.words}", rule.holds)
    return _broken(key, rule, first["input"])


TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "dataclass_type": "a group of settings",
}


def unknown(key: str, kind: type) -> str:
    """The line about a key that no setting of a section has: the one that is meant, or those that there are."""
    names = [name for name, _ in rules(kind)]
    known = dict.fromkeys([*names, *(name.rsplit(".", depth)[0] for name in names for depth in range(1, 4))])
    there = sorted(name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0] and "." in key)
    meant = did_you_mean(key, known, cutoff=0.8 if there else 0.5)
    return f"unknown setting {key}" + (meant or (f"; there are {', '.join(there)}" if there else ""))


def did_you_mean(word: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a message about a misspelt word; empty if no name is like it."""
    return "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(str(word), list(names), 1, cutoff))


def require(holds: bool, key: str, rule: str, got: object) -> None:
    """Raises ConfigError unless a setting `holds` to its rule."""
    if not holds:
        raise ConfigError(f"{key} must be {rule} (got {got})")


def check_value(value: object, key: str, rule: Rule) -> None:
    """Raises ConfigError unless a value keeps the rule."""
    if not rule.holds(value):
        raise _broken(key, rule, value)


def require_each(by: str, *settings: tuple[str, object, object, str]) -> None:
    """Raises ConfigError unless each setting, a tuple (key, value, wanted, why), has the value that `by` needs."""
    for key, value, wanted, why in settings:
        words = "left out" if wanted is None else str(wanted).lower()
        require(value == wanted, key, f"{words} {by}: {why}", value)


def require_one(given: Mapping[str, object], advice: str = ": give one, the other follows from it") -> None:
    """Raises ConfigError unless exactly one of two settings, by their keys, is not None."""
    missing = [value is None for value in given.values()]
    if sum(missing) != 1:
        raise ConfigError(f"{' and '.join(given)} are both {'missing' if all(missing) else 'given'}{advice}")


def _broken(key: str, rule: Rule, value: object) -> ConfigError:
    return ConfigError(f"{key} must be {rule.words} (got {_shown(value)}{did_you_mean(value, rule.names)})")


def _shown(value: object) -> str:
    return str(value) or "''"


def _section_in(annotation: Any) -> Any:
    return next((each for each in (annotation, *get_args(annotation)) if hasattr(each, "key_of")), None)


def _rule_of(annotation: Any) -> Rule | None:
    own = next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Rule)), None)
    return own or next(filter(None, map(_rule_of, get_args(annotation))), None)


_adapter: Any = cache(TypeAdapter)
_annotations: Any = cache(partial(get_type_hints, include_extras=True))
