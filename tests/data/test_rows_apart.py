"""What a cell of one row is read as follows from no other row: one person more or less may change
no other person's contribution."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from discreet.data.cells import owner_numbers
from discreet.data.csv_table import CsvTable
from discreet.data.examples import Examples
from discreet.data.folder import load_folder, node_table
from discreet.data.site_column import sites_of
from discreet.data.targets import FolderError
from discreet.tables.rows_by_person import rows_by_person

DAYS = ("2021-03-01", "2021-09-01")
Row = dict[str, object]


def folder_of(folder: Path, form: str, text: str, toml: str) -> Path:
    folder.mkdir()
    (folder / f"t.{form}").write_text(text)
    (folder / "data.toml").write_text(f'format = "{form}"\nfile = "t.{form}"\ntarget = "y"\n{toml}')
    return folder


def read(folder: Path, rows: list[Row], toml: str) -> Examples:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    examples, _ = node_table(folder_of(folder, "jsonl", lines, toml), "folder")
    return examples


def first(examples: Examples, count: int) -> list[list[object]]:
    parts = (examples.inputs, examples.targets, examples.owners)
    return [[] if part is None else part[:count].tolist() for part in parts]


def test_a_row_with_its_keys_in_another_order_changes_no_other_row(tmp_path: Path) -> None:
    toml = 'classes = ["a", "b"]\nlow = 0\nhigh = 10\n'
    rows: list[Row] = [{"p0": each, "p1": 10 - each, "y": "a"} for each in (1, 2, 3)]
    other: Row = {"p1": 9, "p0": 1, "y": "b"}
    with pytest.raises(FolderError, match="a jsonl file needs inputs, the columns in their order"):
        read(tmp_path / "no inputs", rows, toml)
    toml = f'inputs = ["p0", "p1"]\n{toml}'
    without = read(tmp_path / "without", rows, toml)
    found = read(tmp_path / "with", [other, *rows], toml)
    assert found.inputs[1:].tolist() == without.inputs.tolist()
    # A key that others lack is nothing that could end a run.
    more = read(tmp_path / "more", [*rows, other | {"p2": 5}], toml)
    assert more.inputs[:3].tolist() == without.inputs.tolist()


FORMATS = '["%Y-%d-%m", "%d.%m.%Y"]'
LIKE_TIMES = {
    "a level": ('{ kind = "category", levels = ["2021-03-01", "2021-09-01", "none"] }', "none"),
    "words": ('{ kind = "text", width = 8 }', "seen 2021-09-01"),
    "a format": (
        f'{{ kind = "date", low = 2020-01-01, high = 2022-01-01, format = {FORMATS} }}',
        "01.02.2021",
    ),
}


@pytest.mark.parametrize("kind", LIKE_TIMES)
def test_a_text_that_looks_like_a_time_is_a_text_whatever_other_rows_have(
    kind: str, tmp_path: Path
) -> None:
    column, odd = LIKE_TIMES[kind]
    toml = f'classes = ["a", "b"]\n[columns]\nv = {column}\n'
    rows: list[Row] = [{"v": DAYS[row % 2], "y": "ab"[row % 2]} for row in range(4)]
    without = read(tmp_path / "without", rows, toml)
    found = read(tmp_path / "with", [*rows, {"v": odd, "y": "a"}], toml)
    assert first(found, 4) == first(without, 4)
    assert without.inputs[0].tolist() != without.inputs[1].tolist()


def test_a_target_that_looks_like_a_day_is_the_word_of_its_class(tmp_path: Path) -> None:
    toml = 'classes = ["2021-03-01", "2021-09-01", "none"]\n[columns]\nv = [0, 9]\n'
    rows: list[Row] = [{"v": 1, "y": day} for day in DAYS]
    assert read(tmp_path / "days", rows, toml).targets.tolist() == [0, 1]
    rows += [{"v": 1, "y": "none"}]
    assert read(tmp_path / "none", rows, toml).targets.tolist() == [0, 1, 2]


def test_a_large_number_keeps_its_digits_beside_a_fraction(tmp_path: Path) -> None:
    large = 2**53 + 1
    toml = f'classes = ["a", "b"]\n[columns]\nv = {{ kind = "category", levels = ["{large}"] }}\n'
    rows: list[Row] = [{"v": large, "y": "a"}, {"v": 1.5, "y": "b"}]
    assert read(tmp_path / "rows", rows, toml).inputs.tolist() == [[1, 0], [0, 1]]


def test_owners_that_look_like_times_are_those_that_a_split_sees(tmp_path: Path) -> None:
    toml = 'num_classes = 2\nowner = "who"\n[columns]\nv = [0, 9]\n'
    days = [f"19{50 + row // 2}-01-01" for row in range(6)]
    rows: list[Row] = [{"v": row, "y": row % 2, "who": day} for row, day in enumerate(days)]
    without = read(tmp_path / "without", rows, toml)
    found = read(tmp_path / "with", [*rows, {"v": 1, "y": 0, "who": "ann"}], toml)
    assert first(found, 6) == first(without, 6)
    persons, _ = rows_by_person(CsvTable(tmp_path / "with" / "t.jsonl"), "who")
    assert found.owners is not None
    assert found.owners.tolist() == owner_numbers(np.array(persons)).tolist()


@pytest.mark.parametrize(
    "line",
    ['{"v": "\\ud800", "y": 0}', '{"v": 1, "v": 2, "y": 0}', "[1]", '{"v": 1', '{"v": 1} {"v": 2}'],
)
def test_a_line_that_is_no_object_is_named_and_not_shown(line: str, tmp_path: Path) -> None:
    toml = "num_classes = 2\n[columns]\nv = [0, 9]\n"
    folder = folder_of(tmp_path / "rows", "jsonl", f'{{"v": 1, "y": 0}}\n\n{line}\n', toml)
    said = "t.jsonl, line 3 must be a JSON object, with each key once and in UTF-8$"
    with pytest.raises(FolderError, match=said):
        load_folder(str(folder))
    with pytest.raises(FolderError, match=said):
        rows_by_person(CsvTable(folder / "t.jsonl"), None)


def of_sites(folder: Path, sites: list[str]) -> list[object]:
    lines = "".join(f"{site},{row},0\n" for row, site in enumerate(sites))
    toml = 'inputs = ["v"]\nnum_classes = 2\n'
    task = load_folder(str(folder_of(folder, "csv", f"clinic,v,y\n{lines}", toml)))
    found = sites_of(task, "clinic")
    assert found is not None
    return found.tolist()


@pytest.mark.parametrize(
    "sites", [["01", "02"], ["1.10", "1.20"], ["2021-03-01 10:00", "2021-03-02 10:00"]]
)
def test_a_site_is_what_its_cell_says_whatever_other_sites_are(
    sites: list[str], tmp_path: Path
) -> None:
    assert of_sites(tmp_path / "without", sites) == sites
    assert of_sites(tmp_path / "with", [*sites, "X1"]) == [*sites, "X1"]


@pytest.mark.parametrize(
    ("classes", "cells", "numbers"),
    [
        ('classes = ["0", "1", "unknown", "01"]\n', ["0", "1", "01"], [0, 1, 3]),
        (
            'classes = ["no", "yes", "unknown"]\n'
            'class_words = { True = "yes", False = "no", true = "no" }\n',
            ["true", "False", "True"],
            [0, 0, 1],
        ),
    ],
)
def test_a_class_is_the_word_in_its_cell_whatever_other_cells_are(
    classes: str, cells: list[str], numbers: list[int], tmp_path: Path
) -> None:
    for name, more, wanted in (("without", [], numbers), ("with", ["unknown"], [*numbers, 2])):
        lines = "".join(f"5,{cell}\n" for cell in [*cells, *more])
        folder = folder_of(tmp_path / name, "csv", f"v,y\n{lines}", classes)
        examples, _ = node_table(folder, "folder")
        assert examples.targets.tolist() == wanted


def test_days_are_no_numbers_to_predict(tmp_path: Path) -> None:
    """One cell with a time would count those of others in seconds, not days."""
    toml = "target_low = 0\ntarget_high = 30000\n"
    folder = folder_of(tmp_path / "days", "csv", "v,y\n1,2021-03-01\n", toml)
    with pytest.raises(FolderError, match="targets must be numbers, or words listed in classes"):
        node_table(folder, "folder")
