"""What all sites must say alike of a table before they train one model on it.

A model knows a column by its place and its encoding, so sites whose columns, levels or classes
stand in another order train against each other without a word. The description of each column and
of the target has a digest. The server's digests travel with each request, and a node with another
description refuses. They are made of public facts alone, and say nothing of the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from discreet.data.columns import LOCAL, Column
from discreet.data.description import DataDescription, read_description
from discreet.data.folder import with_inputs
from discreet.data.targets import FolderError

DIGITS = 16
TARGET = "the target"
RANGE = "the range of the inputs"
NUMBERS = "numbers"  # the kind of an input that no column describes


def table_digests(folder: str | Path) -> list[str]:
    """The digests of the table that the data.toml of a folder describes, for
    `check_table` at other sites: of public facts alone. FolderError: it describes none."""
    place = Path(folder)
    return agreed_of(with_inputs(place, read_description(place)))


def check_table(digests: Sequence[str], folder: str | Path) -> None:
    """Raises FolderError, with the first column that differs, unless the folder's table is
    described as the one with these `table_digests`: a model would mean something else here.

    An app of one's own sends them in its train_config, and its clients check before they train."""
    if said := otherwise(table_digests(folder), digests):
        raise FolderError(said)


def otherwise(own: Sequence[str], asked: Sequence[str]) -> str:
    """The refusal of a run whose table is described otherwise than here; empty if it is not."""
    said = difference(own, asked)
    if not said:
        return ""
    adopt = "discreet data adopt takes over the run's description"
    return f"this node describes its table otherwise than the run: {said}. {adopt}"


def agreed_of(description: DataDescription) -> list[str]:
    """A line `NAME DIGEST` for each input in order, and one for the target. Names of files, of the
    target's column, of the owner, and what a site writes otherwise (`LOCAL`) are not in it."""
    lines = [_line(column.name, _facts(column)) for column in description.columns]
    if description.pairs:
        lines.append(_line("[[pairs]]", description.pairs))
    if not description.columns:
        names = description.inputs if isinstance(description.inputs, tuple) else ()
        lines += [_line(name, NUMBERS) for name in names]
        facts = description.low, description.high, description.shape
        of_tokens = description.tokens, description.max_tokens, description.next_token
        lines.append(_line(RANGE, (*facts, *of_tokens)))
    return [*lines, _line(TARGET, _target(description))]


def _facts(column: Column) -> dict[str, object]:
    return {key: value for key, value in column.facts().items() if key not in LOCAL}


def _target(description: DataDescription) -> tuple[object, ...]:
    classes = [word.strip() for word in description.classes]
    ranges = description.target_low, description.target_high
    times = (description.times,) if description.times else ()
    return classes, description.num_classes, description.targets, ranges, *times


def _line(name: str, facts: object) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def difference(own: Sequence[str], asked: Sequence[str]) -> str:
    """How a site's lines differ from the run's, at the first of the run's columns that does; empty
    if they are the same.

    >>> difference(["age 1", "dose 2"], ["dose 2", "age 1"])
    'input 1 of the run is dose, and here it is age'
    >>> difference(["age 1", "dose 2"], ["age 1", "dose 3"])
    'dose is described otherwise here (kind, range, levels, missing, curves, shape or classes)'
    """
    for place, line in enumerate(asked):
        name, _, _ = line.rpartition(" ")
        if place >= len(own):
            return f"{name} is missing here"
        if own[place] == line:
            continue
        here, _, _ = own[place].rpartition(" ")
        names = {each.rpartition(" ")[0] for each in own}
        if here == name:
            kinds = "kind, range, levels, missing, curves, shape or classes"
            return f"{name} is described otherwise here ({kinds})"
        if name not in names:
            return f"{name} is missing here"
        return f"input {place + 1} of the run is {name}, and here it is {here}"
    if len(own) > len(asked):
        return f"{own[len(asked)].rpartition(' ')[0]} is not in the run"
    return ""
