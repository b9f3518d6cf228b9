"""The description of a table that all sites use: `discreet data share` writes it at one site, and
`discreet data adopt` maps another site's names, words and units onto it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from discreet.data.cell_reading import is_empty
from discreet.data.columns import CATEGORY, LOCAL, NUMBER, Column
from discreet.data.csv_table import CsvTable
from discreet.data.description import DataDescription, description_of
from discreet.data.targets import FolderError
from discreet.settings.foreign_files import read_toml
from discreet.settings.rules import did_you_mean
from discreet.tables.header import column_place, names_in
from discreet.tables.written_numbers import marks_in

# The keys that all sites share beside the columns. The others name files, or this site's writing.
SHARED = ("target", "targets", "classes", "num_classes", "target_low", "target_high", "task")
HEAD = (
    "# The description of a table that all sites of a run share: public facts alone. At each site:",
    "# discreet data adopt THIS_FILE --table TABLE --owner COLUMN",
)
MOST_WORDS = 5  # of a column that are listed


@dataclass(frozen=True)
class Writing:
    """How a site writes a shared table.

    Attributes:
      named: the site's column for a shared column or target.
      words: by shared column or target, the level or class that a word stands for.
      factors: the number by which a column is multiplied.
    """

    named: Mapping[str, str]
    words: Mapping[str, Mapping[str, str]]
    factors: Mapping[str, float]


def shared_text(description: DataDescription) -> str:
    """The shared description as TOML, without file names and without what this site writes
    otherwise. FolderError: the description has no columns, so nothing says what an input is."""
    if not description.columns:
        raise FolderError("data share: describe each input under [columns] first (data check)")
    lines = [*HEAD, *_head(description), "", "[columns]"]
    for column in description.columns:
        lines.append(f"{_key(column.name)} = {_inline(_without(column, LOCAL))}")
    return "\n".join([*lines, *_pairs(description)]) + "\n"


def read_shared(path: Path) -> DataDescription:
    """The description in a shared file. FolderError: it is none."""
    given = read_toml(path, FolderError, "is no shared description")
    found = description_of({"format": "csv", "file": "train.csv", **given})
    if not found.columns:
        raise FolderError(f"{path} is no shared description: it has no [columns]")
    return found


def adopted_text(
    shared: DataDescription, table: CsvTable, *, owner: str | None, writing: Writing
) -> str:
    """A site's data.toml for a shared description. FolderError: all that is in the way, a line
    each: columns that the file lacks, and words that no level has."""
    names = names_in(table)
    columns = [_here(column, writing) for column in shared.columns]
    target = writing.named.get(str(shared.target), str(shared.target))
    if owner is not None:
        column_place(owner, table)
    wrong = [*_missing(columns, target, names), *_unknown_names(shared, writing)]
    cells = {name: each.to_pylist() for name, each in table.columns(as_text=True).items()}
    if not wrong:
        wrong = [*_strange_words(columns, cells)]
        wrong += _strange_classes(shared, cells[target], writing.words.get(str(shared.target), {}))
    if wrong:
        raise FolderError(
            "\n  ".join([f"{table.path} does not fit the shared description:", *wrong])
        )
    lines = [f'format = "csv"\nfile = {json.dumps(table.path.name)}']
    lines += [f"separator = {json.dumps(table.mark)}"]
    if owner is not None:
        lines.append(f"owner = {json.dumps(owner)}")
    marks = marks_in(cells).chosen()
    if marks.decimal != ".":
        lines.append(f"decimal = {json.dumps(marks.decimal)}")
    if marks.thousands:
        lines.append(f"thousands = {json.dumps(marks.thousands)}")
    if table.encoding is not None:
        lines.append(f"encoding = {json.dumps(table.encoding)}")
    lines += _head(shared.model_copy(update={"target": target}))
    if words := writing.words.get(str(shared.target)):
        lines.append(f"class_words = {_inline(words)}")
    lines += ["", "[columns]"]
    lines += [f"{_key(column.name)} = {_inline(_without(column, ()))}" for column in columns]
    return "\n".join([*lines, *_pairs(shared)]) + "\n"


def _here(column: Column, writing: Writing) -> Column:
    name = column.name
    words = tuple(writing.words.get(name, {}).items())
    return replace(
        column,
        named=writing.named.get(name),
        words=words,
        factor=writing.factors.get(name, 1.0) if column.kind == NUMBER else 1.0,
    )


def _missing(columns: list[Column], target: str, names: list[str]) -> Iterator[str]:
    for name in (*(column.in_file for column in columns), target):
        if name not in names:
            meant = did_you_mean(name, names)
            yield f"it has no column {name}{meant}: write --named {name}=COLUMN"


def _unknown_names(shared: DataDescription, writing: Writing) -> Iterator[str]:
    known = {column.name for column in shared.columns} | {str(shared.target)}
    for name in {*writing.named, *writing.words, *writing.factors} - known:
        yield f"the shared description has no {name}{did_you_mean(name, sorted(known))}"
    numbers = {column.name for column in shared.columns if column.kind == NUMBER}
    for name in {*writing.factors} & known - numbers:
        yield f"{name} is no number, and has no factor"


def _strange_words(columns: list[Column], cells: Mapping[str, list[Any]]) -> Iterator[str]:
    for column in columns:
        if column.kind == CATEGORY:
            known = {*column.levels, *dict(column.words)}
            yield from _strange(column.name, cells[column.in_file], known, column.levels)


def _strange_classes(
    shared: DataDescription, cells: list[Any], words: Mapping[str, str]
) -> Iterator[str]:
    if shared.classes:
        known = {*shared.classes, *words}
        yield from _strange(str(shared.target), cells, known, shared.classes)


def _strange(
    name: str, cells: list[Any], known: set[str], levels: tuple[str, ...]
) -> Iterator[str]:
    found = {str(cell).strip() for cell in cells if not is_empty(cell)} - known
    if found and (len(found) <= MOST_WORDS):
        yield (
            f"{name} has {', '.join(sorted(found))}, and its levels are {', '.join(levels)}: write "
            f"--words {name}:WORD=LEVEL for each, or correct the table"
        )
    elif found:
        yield f"{name} has {len(found)} words that are none of {', '.join(levels)}"


def _head(description: DataDescription) -> list[str]:
    facts = description.facts()
    return [f"{key} = {_value(facts[key])}" for key in SHARED if key in facts]


def _pairs(description: DataDescription) -> list[str]:
    return [f"\n[[pairs]]\ncolumns = {_value(pair)}" for pair in description.pairs]


def _without(column: Column, left_out: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in column.facts().items() if key not in left_out}


def _inline(facts: Mapping[str, Any]) -> str:
    inner = ", ".join(f"{_key(key)} = {_value(value)}" for key, value in facts.items())
    return f"{{ {inner} }}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return _inline(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    plain = name.replace("_", "").replace("-", "")
    if plain.isascii() and plain.isalnum():
        return name
    return json.dumps(name, ensure_ascii=False)
