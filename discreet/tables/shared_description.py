"""The description of a table that all sites use: `discreet data share` writes it at one site, and
`discreet data adopt` maps another site's names, words and units onto it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from discreet.data.cell_reading import Marks, word_in
from discreet.data.columns import CATEGORY, LOCAL, NUMBER, Column, chapter_of
from discreet.data.csv_table import CsvTable
from discreet.data.description import DataDescription, description_of
from discreet.data.empty_cells import is_empty
from discreet.data.targets import FolderError
from discreet.settings.foreign_files import one_line, read_toml
from discreet.settings.rules import did_you_mean
from discreet.tables.header import column_place, names_in
from discreet.tables.written_numbers import marks_in

# The keys that all sites share beside the columns. The others name files, or this site's writing.
TARGETS = ("target", "targets", "event")
SHARED = (*TARGETS, "times", "classes", "num_classes", "target_low", "target_high", "task")
HEAD = (
    "# The description of a table that all sites share. Each word must be public, also `missing`",
    "# and `below`, which data check writes if a cell is empty or below a limit. At each site:",
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
    for column in found.columns:
        if not column.name.isprintable():
            raise FolderError(f"{path}: the name of a column can't be printed: {column.name!a}")
        if own := [key for key in LOCAL if key in column.facts()]:
            raise FolderError(
                f"{path}: {column.name} has {' and '.join(own)}, which each site writes for itself"
            )
    return found


def adopted_text(
    shared: DataDescription, table: CsvTable, *, owner: str | None, writing: Writing
) -> str:
    """A site's data.toml for a shared description. FolderError: all that is in the way, a line
    each: columns that the file lacks, and words that no level has."""
    names = names_in(table)
    _refuse(table, [*_wrong_levels(shared, writing)])
    columns = [_here(column, writing) for column in shared.columns]
    targets = {name: writing.named.get(name, name) for name in shared.target_names}
    classed = str(shared.event or shared.target)
    class_words = writing.words.get(classed, {})
    if owner is not None:
        column_place(owner, table)
    meant = {column.name: column.in_file for column in columns} | targets
    wrong = [*_missing(meant, names, shared.targets), *_unknown_names(shared, writing)]
    wrong += _named_twice(meant if owner is None else meant | {"the owner": owner})
    cells = {name: each.to_pylist() for name, each in table.columns(as_text=True).items()}
    if not wrong:
        wrong = [*_strange_words(columns, cells)]
        if shared.classes:
            known = {*shared.classes, *class_words}
            wrong += _strange(classed, cells[targets[classed]], known, shared.classes)
    _refuse(table, wrong)
    lines = [*_site_lines(table, marks_in(cells).chosen(), owner)]
    lines += _head(_renamed(shared, targets))
    if class_words:
        lines.append(f"class_words = {_inline(class_words)}")
    lines += ["", "[columns]"]
    lines += [f"{_key(column.name)} = {_inline(_without(column, ()))}" for column in columns]
    text = "\n".join([*lines, *_pairs(shared)]) + "\n"
    with one_line(table.path, FolderError, "can't be described so"):
        description_of(tomllib.loads(text))
    return text


def _refuse(table: CsvTable, wrong: list[str]) -> None:
    """Raises FolderError if there is anything in the way."""
    if wrong:
        raise FolderError(
            "\n  ".join([f"{table.path} does not fit the shared description:", *wrong])
        )


def _wrong_levels(shared: DataDescription, writing: Writing) -> Iterator[str]:
    """Words that stand for no level or class, or for a level though they are one."""
    levels = {column.name: column.levels for column in shared.columns if column.kind == CATEGORY}
    classes = {str(shared.event or shared.target): shared.classes} if shared.classes else {}
    for name, words in writing.words.items():
        known = (levels | classes).get(name, ())
        for word, level in words.items():
            if known and (level not in known or word in levels.get(name, ())):
                yield (
                    f"--words {name}:{word}={level}: the shared words of {name} are "
                    f"{', '.join(known)}. Write this site's word first: --words {name}:WORD=LEVEL, "
                    "with LEVEL one of them"
                )


def _site_lines(table: CsvTable, marks: Marks, owner: str | None) -> Iterator[str]:
    """The keys that say where and how a site's table is written."""
    yield 'format = "csv"'
    yield f"file = {json.dumps(table.path.name)}"
    yield f"separator = {json.dumps(table.mark)}"
    if owner is not None:
        yield f"owner = {json.dumps(owner)}"
    if marks.decimal != ".":
        yield f"decimal = {json.dumps(marks.decimal)}"
    if marks.thousands:
        yield f"thousands = {json.dumps(marks.thousands)}"
    if table.encoding is not None:
        yield f"encoding = {json.dumps(table.encoding)}"


def _here(column: Column, writing: Writing) -> Column:
    name = column.name
    words = tuple(writing.words.get(name, {}).items())
    return replace(
        column,
        named=writing.named.get(name),
        words=words,
        factor=writing.factors.get(name, 1.0) if column.kind == NUMBER else 1.0,
    )


def _renamed(shared: DataDescription, targets: Mapping[str, str]) -> DataDescription:
    """The description with the site's own names of its target and event."""
    keys = ("target", "event")
    here = {key: targets[name] for key in keys if (name := getattr(shared, key)) is not None}
    return shared.model_copy(update=here)


def _missing(meant: Mapping[str, str], names: list[str], targets: tuple[str, ...]) -> Iterator[str]:
    """Columns that the file lacks. `targets`: several, which have the same names at all sites."""
    for name, column in meant.items():
        if name in targets and name not in names:
            yield f"it has no column {name}: give the target this name in the table"
        elif column not in names:
            hint = did_you_mean(column, names)
            yield f"it has no column {column}{hint}: write --named {name}=COLUMN"


def _named_twice(meant: Mapping[str, str]) -> Iterator[str]:
    """Columns of the file that would be read as several things."""
    for column in sorted({*meant.values()}):
        names = [name for name, given in meant.items() if given == column]
        if len(names) > 1:
            yield f"its column {column} can't be {' and '.join(names)}: write --named for each"


def _unknown_names(shared: DataDescription, writing: Writing) -> Iterator[str]:
    for name in {*writing.named} & {*shared.targets}:
        yield f"{name} is one of several targets, which have the same names at all sites"
    known = {column.name for column in shared.columns} | {*shared.target_names}
    for name in {*writing.named, *writing.words, *writing.factors} - known:
        yield f"the shared description has no {name}{did_you_mean(name, sorted(known))}"
    numbers = {column.name for column in shared.columns if column.kind == NUMBER}
    for name in {*writing.factors} & known - numbers:
        yield f"{name} is no number, and has no factor"


def _strange_words(columns: list[Column], cells: Mapping[str, list[Any]]) -> Iterator[str]:
    for column in columns:
        if column.kind == CATEGORY:
            own = cells[column.in_file]
            known = {*column.levels, *dict(column.words)}
            if column.fold is not None:
                known |= {word for word in map(word_in, own) if chapter_of(word) in known}
            yield from _strange(column.name, own, known, column.levels)


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
