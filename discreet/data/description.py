"""`data.toml`, the description of the data in a folder. The docstring of `discreet/data/folder.py`
lists its keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from discreet.data.cell_reading import Marks
from discreet.data.columns import TEXT, Column, Pair, columns_of
from discreet.data.targets import (
    CLASS,
    LABELS,
    NUMBERS,
    SEQUENCES,
    SURVIVAL,
    Array,
    FolderError,
    Target,
)
from discreet.per_example.objective import PADDING
from discreet.settings.foreign_files import one_line, read_toml
from discreet.settings.rules import did_you_mean
from discreet.settings.training import HF

DESCRIPTION = "data.toml"
Bound = float | tuple[float, ...]
SEPARATOR = re.compile(r"[\t !#-~]")  # no quote
AtLeastTwo = Annotated[int, Field(ge=2)]
TABLES = ("csv", "parquet", "jsonl")
# Keys that are given together or not at all.
TOGETHER = (
    ("low", "high"),
    ("target_low", "target_high"),
    ("text", "max_tokens"),
    ("event", "times"),
)
# By key, the keys that can't be given beside it.
APART = {
    "tokens": ("low",),
    "text": ("inputs", "low", "tokens", "padding", "shape"),
    "columns": ("inputs", "low", "tokens", "text", "shape", "next_token"),
    "num_classes": ("classes", "target_low"),
    "classes": ("target_low",),
    "times": ("targets", "target_low", "num_classes", "padding", "next_token", "test_target"),
    "next_token": ("target", "targets", "classes", "num_classes", "target_low", "test_target"),
}
# The formats that know a key.
FORMATS = {
    **dict.fromkeys(("columns", "text"), TABLES),
    **dict.fromkeys(("separator", "decimal", "thousands", "encoding"), ("csv",)),
}


class DataDescription(BaseModel):
    """The keys of `data.toml`. ValueError: values contradict each other."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["csv", "parquet", "jsonl", "npz", "idx"]
    file: str
    target: str | None = None
    targets: tuple[str, ...] = ()
    event: str | None = None
    times: tuple[float, ...] = ()
    target_low: Bound | None = None
    target_high: Bound | None = None
    inputs: str | tuple[str, ...] | None = None
    low: Bound | None = None
    high: Bound | None = None
    classes: tuple[str, ...] = ()
    class_words: dict[str, str] = {}
    task: str | None = None
    test: str | None = None
    test_target: str | None = None
    num_classes: AtLeastTwo | None = None
    shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    owner: str | None = None
    ids: Literal["exact", "folded"] | None = None
    model: str | None = None
    mechanism: str | None = None
    metrics: tuple[str, ...] = ()
    tokens: AtLeastTwo | None = None
    text: str | None = None
    max_tokens: AtLeastTwo | None = None
    padding: int | str | None = None
    next_token: bool = False
    columns: tuple[Column, ...] = ()
    pairs: tuple[Pair, ...] = ()
    separator: str | None = None
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", "'", " ", "\u00a0", "\u2009", "\u202f"] | None = None
    encoding: str | None = None
    unconfirmed: tuple[str, ...] = ()
    public: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        for kept, rule in self._rules():
            if not kept:
                raise ValueError(rule)
        return self

    def _rules(self) -> Iterator[tuple[bool, str]]:
        fields = DataDescription.model_fields.items()
        given = {name for name, field in fields if getattr(self, name) != field.default}
        for pair in TOGETHER:
            yield (
                len(given & {*pair}) != 1,
                f"{' and '.join(pair)} must be given together, and not empty",
            )
        for name, others in APART.items():
            for other in others:
                yield not {name, other} <= given, f"{name} can't be combined with {other}"
        for name, formats in FORMATS.items():
            fine = name not in given or self.format in formats
            yield fine, f"{name} is only for {', '.join(formats)}"
        yield from _range_rules("low", self.low, self.high)
        yield from _range_rules("target_low", self.target_low, self.target_high)
        yield from self._target_rules(given)
        yield from self._input_rules()

    def _target_rules(self, given: set[str]) -> Iterator[tuple[bool, str]]:
        one = (self.target is None) != (not self.targets)
        yield self.next_token or one, "target or targets must be given, and not both"
        needed = not self.next_token or bool(given & {"tokens", "text"})
        yield needed, "next_token needs tokens or text"
        single = not self.targets or self.padding is not None
        rule = (
            "classes and num_classes describe a single target, and can't be combined with targets"
        )
        yield single or not given & {"classes", "num_classes"}, rule
        known = {*self.class_words.values()} <= {word.strip() for word in self.classes}
        yield known, "class_words must map words to classes"
        ascending = all(low < high for low, high in pairwise((0.0, *self.times)))
        rule = "times must be the ends of the intervals, finite, ascending and above 0"
        yield ascending and all(map(math.isfinite, self.times)), rule
        rule = "with times, classes must be two: the words for no event and for the event"
        yield not self.times or len(self.classes) in (0, 2), rule
        yield not self.times or self.format in TABLES, f"times is only for {', '.join(TABLES)}"
        kind, rule = (
            (str, "a text that is not in classes") if self.classes else (int, "a whole number")
        )
        fine = self.padding is None or (
            isinstance(self.padding, kind) and self.padding not in self.classes
        )
        yield fine, f"padding must be {rule} (got {self.padding!r})"

    def _input_rules(self) -> Iterator[tuple[bool, str]]:
        of_text = self.text is None or (self.model or "").startswith(HF)
        yield of_text, f'text needs model = "{HF}FOLDER", whose tokenizer reads it'
        taken = {*self.target_names, self.owner}
        both = [column.name for column in self.columns if column.in_file in taken]
        yield not both, f"columns: {', '.join(both)} is the target or the owner, not an input"
        for pair in self.pairs:
            yield self._crosses(pair), f"pairs: {' and '.join(pair)} must be two of [columns]"
        two = max(len(self.classes), self.num_classes or 2) <= 2
        crossed = {name for pair in self.pairs for name in pair}
        for name in (column.name for column in self.columns if column.rises or column.falls):
            yield two, f"columns: {name} can't rise or fall with more than two classes"
            yield name not in crossed, f"columns: {name} can't rise or fall: it is in a pair"
        told = ", ".join(self.unconfirmed)
        yield (
            not self.unconfirmed,
            f"unconfirmed lists {told}: their descriptions were read from the data and "
            "are not private. Replace them by public values, and remove the names "
            "from the list",
        )
        yield self.thousands != self.decimal, "thousands must be another sign than decimal"
        fine = self.separator is None or bool(SEPARATOR.fullmatch(self.separator))
        yield fine, "separator must be one sign of ASCII, and no quote or line break"

    def _crosses(self, pair: Pair) -> bool:
        known = {column.name for column in self.columns if column.kind != TEXT}
        return len({*pair}) == 2 and {*pair} <= known

    @property
    def target_names(self) -> tuple[str, ...]:
        """The columns or arrays of the target."""
        # none with next_token
        if self.target is None:
            return self.targets
        if self.event is not None:
            return (self.target, self.event)
        return (self.target,)

    @property
    def marks(self) -> Marks:
        """The marks in numbers that are text."""
        return Marks(self.decimal, self.thousands or "")

    def facts(self) -> dict[str, Any]:
        """The given keys, in the form of JSON and of `description_of`."""
        found = self.model_dump(mode="json", exclude_defaults=True, exclude={"columns"})
        described = {column.name: column.facts() for column in self.columns}
        return found | ({"columns": described} if described else {})

    @property
    def mark(self) -> int:
        """The number that marks padding in targets, after words have become numbers."""
        if isinstance(self.padding, int):
            return self.padding
        return PADDING

    def predicted(self, targets: Array) -> Target:
        """The target of the task that the folder describes; `targets` are an example of it."""
        if self.next_token or self.padding is not None:
            if targets.ndim != 2 or not targets.shape[1]:
                raise FolderError(
                    f"{self.file}: targets of sequences must be (n, length), not {targets.shape}"
                )
            return Target(SEQUENCES, length=targets.shape[1])
        if self.times:
            names = tuple(f"{end:g}" for end in self.times)
            return Target(SURVIVAL, names, (0.0, *self.times[:-1]), self.times)
        if self.target_low is None or self.target_high is None:
            if self.targets:
                return Target(LABELS, self.targets)
            return CLASS
        low, high = (
            _for_each(bound, len(self.target_names))
            for bound in (self.target_low, self.target_high)
        )
        return Target(NUMBERS, self.target_names, low, high)


def _range_rules(name: str, low: Bound | None, high: Bound | None) -> Iterator[tuple[bool, str]]:
    above = name.replace("low", "high")
    if low is not None and high is not None:
        lows = np.asarray(low, float)
        highs = np.asarray(high, float)
        as_many = len({lows.size, highs.size} - {1}) < 2
        yield as_many, f"{name} and {above} must be one number each, or lists of equal length"
        with np.errstate(over="ignore", invalid="ignore"):
            fine = bool(np.all((highs > lows) & np.isfinite(highs - lows)))
        yield fine, f"{above} must be above {name}, and both finite (got {high} and {low})"


def _for_each(bound: Bound, count: int) -> tuple[float, ...]:
    if isinstance(bound, tuple):
        values = tuple(map(float, bound))
    else:
        values = (float(bound),) * count
    if len(values) != count:
        raise FolderError(f"target_low and target_high must be one number or {count} of them")
    return values


def _pair_of(value: Any) -> Pair:
    """The names of two columns, as TOML or JSON has them."""
    names = value.get("columns") if isinstance(value, Mapping) else value
    if not isinstance(names, list | tuple) or len(names) != 2:
        raise FolderError('pairs: write [[pairs]] columns = ["one", "other"] for each')
    return str(names[0]), str(names[1])


def _pairs_of(given: Any) -> tuple[Pair, ...]:
    if not isinstance(given, list | tuple):
        raise FolderError('pairs: write [[pairs]] columns = ["one", "other"] for each')
    return tuple(map(_pair_of, given))


def read_description(folder: Path, *, confirmed: bool = True) -> DataDescription:
    """`data.toml` of a folder; a transformer that it names beside the folder by its absolute path.
    `confirmed`: nothing may be unconfirmed in it. Raises FolderError: it is missing, is not TOML,
    or has a key that is unknown, missing, or of the wrong kind."""
    path = folder / DESCRIPTION
    if not path.exists():
        raise FolderError(f"{path} is missing: it describes the data file and its format")
    settings = read_toml(path, FolderError)
    if not confirmed:
        settings.pop("unconfirmed", None)
    elif settings.get("columns") == {}:
        raise FolderError(f"{path}: [columns] is empty: describe columns below it, or remove it")
    if str(settings.get("model", "")).startswith(HF):
        with one_line(path, FolderError):
            weights = Path(settings["model"].removeprefix(HF)).expanduser()
            settings["model"] = f"{HF}{(folder / weights).resolve()}"
    try:
        return description_of(settings)
    except FolderError as error:
        raise FolderError(f"{path}: {error}") from error


def description_of(settings: Mapping[str, Any]) -> DataDescription:
    """The description with these keys, from TOML or JSON. FolderError: the mistake, with its
    key."""
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    try:
        if isinstance(columns := given.get("columns"), Mapping):
            given["columns"] = columns_of(columns)
        if "pairs" in given:
            given["pairs"] = _pairs_of(given["pairs"])
        return DataDescription.model_validate(given)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ""
        said = wrong["msg"].removeprefix("Value error, ")
        if wrong["loc"]:
            key = str(wrong["loc"][0])
            said = f"{key}: {wrong['msg']}"
        if wrong["type"] == "tuple_type":
            said = f"{key} must be a list, such as {key} = [{wrong['input']!r:.60}]"
        if wrong["type"] == "extra_forbidden":
            said = f"unknown key {key}{did_you_mean(key, DataDescription.model_fields)}"
        raise FolderError(said) from error
    except ValueError as error:
        raise FolderError(f"columns: {error}") from error
