"""Columns that a data.toml leaves out, proposed once their cells are corrected."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence

from discreet.data.cell_reading import Marks
from discreet.data.csv_table import CsvTable
from discreet.tables.proposal import NO_INPUTS, column_lines, guessed_column
from discreet.tables.written_numbers import marks_in

LEFT_OUT = re.compile(r"# (.+?) is left out: ")
UNCONFIRMED = re.compile(r"^unconfirmed = .*$", re.M)


def completed(
    text: str, table: CsvTable, cells: Mapping[str, Sequence[str]], marks: Marks
) -> tuple[str, list[str]]:
    """The text of data.toml, in which each column that it says is left out is proposed again, and
    the names of those that can be described now. They are unconfirmed."""
    both_marks = marks_in(cells).both
    lines = text.splitlines()
    described = list[str]()
    for place, line in enumerate(lines):
        found = LEFT_OUT.match(line)
        name = found[1].strip('"') if found else ""
        if name in cells and found is not None:
            guess = guessed_column(name, cells[name], marks, both_marks=both_marks)
            (lines[place],) = column_lines({name: guess}, table)
            described += [name] * bool(guess.line)
    if described:
        lines = [line for line in lines if line != NO_INPUTS]
    return _with_unconfirmed("\n".join(lines) + "\n", described), described


def _with_unconfirmed(text: str, names: list[str]) -> str:
    if not names:
        return text
    before = tomllib.loads(text).get("unconfirmed", [])
    line = f"unconfirmed = {json.dumps([*before, *names], ensure_ascii=False)}"
    if UNCONFIRMED.search(text):
        return UNCONFIRMED.sub(lambda _: line, text, count=1)
    return f"{line}\n{text}"
