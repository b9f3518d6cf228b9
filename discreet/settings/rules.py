"""Ranges of settings, and sections: frozen pydantic dataclasses. A mistake gives one line with key,
rule and value."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from functools import cache, partial
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from discreet.privacy.quantile import LARGEST_NUMBER, LEAST_NUMBER
from discreet.settings.wording import Key, Phrase, Wording, joined

T = TypeVar("T")
ABSENT = (("mechanism", None), ("mechanism_numbers", None), ("keep", None))
CALL_SETTINGS = ("output_dir", "resume", "device")  # of one call, beside the settings of a run
# the largest numbers of characters of a value in a message, and of a message
LONGEST_SHOWN = 200
LONGEST_MESSAGE = 2000
MOST_LISTED = 10  # mistakes in one refusal: a stranger's message may have any number
NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?")


class Rule:
    """A rule for a value, in words and as a test; used in an annotation. `names` are suggested for
    a misspelt value."""

    def __init__(
        self, words: str, holds: Callable[[Any], bool], names: tuple[str, ...] = ()
    ) -> None:
        self.words = words
        self.holds = holds
        self.names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._kept).__get_pydantic_core_schema__(source, handler)

    def _kept(self, value: T) -> T:
        if not self.holds(value):
            raise ValueError(self.words)
        return value


def one_of(*names: str) -> Rule:
    """The rule that a value is one of the names."""
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names)


def at_least(least: int) -> Rule:
    """The rule that a whole number has a minimum."""
    return Rule(f"at least {least}", lambda value: least <= value)


def within(least: float, largest: float) -> Rule:
    """The rule that a number lies in a closed interval."""
    return Rule(f"within [{least:g}, {largest:g}]", lambda value: least <= value <= largest)


def list_of(each: Rule, one: str) -> Rule:
    """The rule that a list has at least one number, and each number follows a rule."""
    words = f"a list of numbers {each.words}, one per {one}"
    return Rule(words, lambda values: bool(values) and all(map(each.holds, values)))


def different(*names: str, own: str = "") -> Rule:
    """The rule that a list has at least one of the names, and no name twice. `own`: how names from
    outside are written, which have a colon."""
    words = f"a list of different names out of {', '.join(names)}"
    if own:
        words += f", or of your own, as {own}"

    def holds(given: list[str]) -> bool:
        unknown = [name for name in given if name not in names and not (own and ":" in name)]
        return bool(given) and not unknown and len({*given}) == len(given)

    return Rule(words, holds, names if own else ())


# Numbers within the range of float32: a server can't hide a gradient below the smallest float, or
# beyond the largest.
POSITIVE = within(LEAST_NUMBER, LARGEST_NUMBER)
FINITE = within(-LARGEST_NUMBER, LARGEST_NUMBER)
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[
    float, Rule(f"0 or {POSITIVE.words}", lambda value: value == 0 or POSITIVE.holds(value))
]
ClipNorm = Annotated[  # infinity: nothing is clipped
    float,
    Field(allow_inf_nan=True),
    Rule(POSITIVE.words, lambda value: value == math.inf or POSITIVE.holds(value)),
]
Finite = Annotated[float, FINITE]
OpenShare = Annotated[float, Rule("within (0, 1)", lambda value: 0 < value < 1)]
Probability = Annotated[float, Rule("within (0, 1]", lambda value: 0 < value <= 1)]
# far beyond 1e4 a model overflows in its first round
LearningRate = Annotated[float, within(LEAST_NUMBER, 1e4)]
Momentum = Annotated[float, Rule("within [0, 1)", lambda value: 0 <= value < 1)]
# Numbers from a server decide how long a node computes a plan, so their maxima are public.
Count = Annotated[int, within(1, 1_000_000_000)]
Rank = Annotated[int, within(1, 4096)]  # of low-rank matrices
Rounds = Annotated[int, within(1, 100_000)]
CountOrZero = Annotated[int, at_least(0)]
Seed = Annotated[int, Rule("within [0, 2^64 - 1]", lambda value: 0 <= value < 1 << 64)]
# on a command line 2024 is a number, but also the name of a folder
Text = Annotated[str, Field(strict=False)]
Sampling = Annotated[str, one_of("poisson", "fixed", "everyone", "cyclic")]


class ConfigError(ValueError):
    """A setting is unknown, of the wrong type, or out of its range. The message is one line for
    each mistake, with the setting's name; `in_words` replaces it by the name that an interface
    uses."""

    def __init__(self, message: Phrase) -> None:
        # The message of a library, of a user's model, or about a value may have many lines or be
        # very long.
        if isinstance(message, str):
            message = brief(message.replace("\n", " "), longest=LONGEST_MESSAGE)
        super().__init__(message)


def require_extra(*modules: str, why: str) -> None:
    """Raises ConfigError, with the extra of pyproject.toml that installs it, if a module is not
    installed. Imports nothing.

    >>> require_extra("tomllib", why="reading a table")
    """
    for module in modules:
        if find_spec(module) is None:
            from discreet.settings.extras import not_installed

            raise ConfigError(not_installed(module, why))


# Of sections and messages: unknown keys and values of another type are mistakes.
CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, coerce_numbers_to_str=True)


def hyphened(prefix: str, *names: str) -> dict[str, str]:
    """The keys of fields whose names have several words, as files of owners write them.

    >>> hyphened("limits.", "disk_mb")
    {'disk_mb': 'limits.disk-mb'}
    """
    return {name: prefix + name.replace("_", "-") for name in names}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def section(prefix: str, **elsewhere: str) -> Callable[[type[T]], type[T]]:
    """A decorator that makes a class a frozen pydantic dataclass whose mistakes are a ConfigError.
    `prefix` starts the keys of its settings, such as "privacy.user."; `elsewhere` has the prefixes
    of fields that differ."""

    def made(kind: type[T]) -> type[T]:
        checked: Any = dataclass(frozen=True, config=CONFIG)(kind)
        validate = checked.__init__

        def init(self: Any, *args: Any, **values: Any) -> None:
            try:
                validate(self, *args, **values)
            except ValidationError as error:
                raise config_error(error, checked) from error

        checked.__init__ = init
        checked.key_of = staticmethod(lambda name: elsewhere.get(name, prefix + name))
        return cast(type[T], checked)

    return made


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(kind: type[T]) -> type[T]:
    """A decorator that makes a class a frozen dataclass that is checked, as a section is, where it
    is read from outside (`read_json`). In the process that makes it, its values are checked
    already."""
    made: Any = dataclasses.dataclass(frozen=True)(kind)
    made.__pydantic_config__ = CONFIG
    made.key_of = staticmethod(str)
    return cast(type[T], made)


def read_json(kind: type[T], text: str | bytes) -> T:
    """A section, with its nested sections, from JSON text. ConfigError: one line that names the
    setting that is unknown, of the wrong type, or out of range."""
    try:
        return cast(T, _adapter(kind).validate_json(text))
    except ValidationError as error:
        raise config_error(error, kind) from error


def settings_json(value: Any) -> str:
    """The JSON text of a section, equal for equal sections. What is `ABSENT` is omitted."""
    return json.dumps(
        asdict(value, dict_factory=lambda fields: {k: v for k, v in fields if (k, v) not in ABSENT})
    )


def rules(kind: Any) -> Iterator[tuple[str, Rule | None]]:
    """Every setting of a section and of its nested sections by its full key, with its rule."""
    for name, annotation in _annotations(kind).items():
        if inner := _section_in(annotation):
            yield from rules(inner)
        else:
            yield kind.key_of(name), _rule_of(annotation)


def config_error(error: ValidationError, kind: Any) -> ConfigError:
    """The mistakes in a section, each in one line with the setting's full key, its rule and the
    value; of very many, the first."""
    found = error.errors(include_url=False)[:MOST_LISTED]
    return all_of([_mistake(each, kind) for each in found])


def all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """One error with the messages of several, a line for each."""
    messages = list(dict.fromkeys(error.args[0] for error in errors))
    if len(messages) == 1:
        return errors[0]
    return ConfigError(joined("\n  ", messages))


def check_all(*checks: Callable[[], object]) -> None:
    """Makes all the checks, so that one mistake does not hide the next. ConfigError: a line for
    each that fails."""
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(error)
    if found:
        raise all_of(found)


def _mistake(first: Any, kind: Any) -> ConfigError:
    if isinstance(cause := first.get("ctx", {}).get("error"), ConfigError):  # of a `__post_init__`
        return cause
    if not first["loc"]:
        return ConfigError(first["msg"])
    key = ""
    annotation = kind
    for name in first["loc"]:
        outer = _section_in(annotation)
        if outer is None:  # in a list, or in one of two types
            break
        if isinstance(name, int):  # an argument that was given by its position
            name = list(_annotations(outer))[name]
        key = outer.key_of(name)
        annotation = _annotations(outer).get(name)
    if first["type"] == "unexpected_keyword_argument":
        return ConfigError(unknown(key, kind))
    if first["type"] == "missing":
        return ConfigError(Wording(Key(key), " must be given"))
    known = _rule_of(annotation)
    words = TYPES.get(first["type"], "")
    if known is None:
        from discreet.settings.other_names import MAIN

        if key in MAIN:
            meant = f"; did you mean {key}.{MAIN[key]}?"
        else:
            meant = ""
        rule = f" must be {words or first['msg']} (got {_given(first)}){meant}"
        return ConfigError(Wording(Key(key), rule))
    if words and known.words.startswith(("at least", "within", "0 or")):
        known = Rule(f"{words}, {known.words}", known.holds)
    return _broken(key, known, first["input"], shown=_given(first))


def _given(first: Mapping[str, Any]) -> str:
    """The given value, for a message. A text that looks like the number that it should be is shown
    in quotes."""
    value = first["input"]
    looks = (
        isinstance(value, str)
        and first["type"] in ("int_type", "float_type")
        and NUMBER.fullmatch(value)
    )
    if looks:
        return f"the text {value!r}"
    return brief(value)


TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "numbers by name",
    "dataclass_type": "a group of settings",
}


def unknown(key: str, kind: type) -> str:
    """The line about a key that no setting of a section has: with the setting that is probably
    meant, or all settings."""
    names = [*CALL_SETTINGS, *(name for name, _ in rules(kind))]
    known = dict.fromkeys(
        [*names, *(name.rsplit(".", depth)[0] for name in names for depth in range(1, 4))]
    )
    there = sorted(
        name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0] and "." in key
    )
    meant = _alias_of(key, names) or did_you_mean(key, known, cutoff=0.8 if there else 0.55)
    return f"unknown setting {key}" + (
        meant or (f"; there are {', '.join(there)}" if there else "")
    )


def _alias_of(key: str, names: Sequence[str]) -> str:
    """The end of a message about a key whose last word is an alias; settings in the same group come
    first."""
    from discreet.settings.other_names import ALIASES

    group, _, word = key.rpartition(".")
    meant = ALIASES.get(word, "")
    near = f"{group}.{meant.rpartition('.')[2]}"
    known = [each for each in (near, meant) if each in names]
    if known:
        return f"; did you mean {known[0]}?"
    return ""


def did_you_mean(word: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a message about a misspelt word; empty if no name is similar."""
    return "".join(
        f"; did you mean {each}?"
        for each in difflib.get_close_matches(str(word), list(names), 1, cutoff)
    )


def plain(value: Any) -> Any:
    """A number of numpy or of a tensor as Python's own; any other value unchanged."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value


def require(holds: bool, key: str, rule: Phrase, got: object) -> None:
    """Raises ConfigError about a setting unless `holds`."""
    if not holds:
        raise ConfigError(Wording(Key(key), " must be ", rule, f" (got {brief(got)})"))


def check_value(value: object, key: str, rule: Rule) -> None:
    """Raises ConfigError unless a value follows the rule."""
    if not rule.holds(value):
        raise _broken(key, rule, value)


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


def _broken(key: str, rule: Rule, value: object, *, shown: str | None = None) -> ConfigError:
    if shown is None:
        got = brief(value)
    else:
        got = shown
    hint = did_you_mean(value, rule.names)
    return ConfigError(Wording(Key(key), f" must be {rule.words} (got {got}{hint})"))


def brief(value: object, *, longest: int = LONGEST_SHOWN) -> str:
    """A value as a message shows it; a long one is truncated.

    >>> brief("x" * 500)[-23:]
    'xx... (500 characters)'
    """
    text = str(value) or "''"
    if len(text) <= longest:
        return text
    return f"{text[:longest]}... ({len(text)} characters)"


def _section_in(annotation: Any) -> Any:
    return next(
        (each for each in (annotation, *get_args(annotation)) if hasattr(each, "key_of")), None
    )


def _rule_of(annotation: Any) -> Rule | None:
    own = next(
        (each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Rule)), None
    )
    return own or next(filter(None, map(_rule_of, get_args(annotation))), None)


_adapter: Any = cache(TypeAdapter)
_annotations: Any = cache(partial(get_type_hints, include_extras=True))
