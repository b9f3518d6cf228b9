"""A quote that begins a cell and does not end takes the rows of other people into that cell. It is
refused wherever rows are read by whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.data.csv_table import CsvTable
from discreet.data.folder import node_table
from discreet.data.targets import FolderError
from discreet.guard.patient_blocks import split_site
from discreet.settings.rules import ConfigError
from discreet.tables.owner_split import split_by_owner
from tests.tables.made_tables import write_hospital

HEAD = "pid,age,returned,note"
THREE = "pid,age,note"
OTHERS = [f"P{number},{number},{('no', 'yes')[number % 2]},n{number}" for number in range(20, 60)]
FIRST, LAST = 'A1,33,no,"severe', "Z9,30,yes,{}"
# what one patient's note begins, and another's ends or not
SWALLOWED = {
    "to the end": [FIRST, *OTHERS],
    "to a quote": [FIRST, *OTHERS, LAST.format('"bad')],
    "to a last quote": [FIRST, *OTHERS, LAST.format('bad"')],
    "from the middle": [*OTHERS[:20], FIRST, *OTHERS[20:], LAST.format('bad"')],
}
HONEST = [
    'A1,33,no,5" cut',
    'A1,33,no,"a ""quoted"" word"',
    'A1,33,no,"two lines,\nthe second without"',
    'A1,33,no,"a, b\nc, d, e, f\ng"',
]


def write(folder: Path, rows: list[str]) -> Path:
    columns = "age = [0, 110]\n"
    test = [HEAD, "T1,40,no,t", "T2,80,yes,t"]
    return write_hospital(folder, columns, {"train": [HEAD, *rows], "test": test})


@pytest.mark.parametrize("rows", SWALLOWED.values(), ids=SWALLOWED)
def test_rows_within_a_quote_that_does_not_end_are_refused(rows: list[str], tmp_path: Path) -> None:
    table = write(tmp_path / "data", rows) / "train.csv"
    line = rows.index(FIRST) + 2
    with pytest.raises(FolderError, match=f"line {line} to "):
        node_table(table.parent, "folder")
    with pytest.raises(FolderError, match=f"line {line} to "):
        split_by_owner(CsvTable(table), owner="pid", share=0.2)
    with pytest.raises(ConfigError, match=f"line {line} to "):
        split_site(table, tmp_path / "site", id_column="pid", count=5)
    assert not (tmp_path / "site" / "blocks").exists()


def test_of_three_columns_numbers_tell_rows_from_prose(tmp_path: Path) -> None:
    table = tmp_path / "three.csv"
    table.write_text(f'{THREE}\nP1,60,"Pain, since\nMay, and "" worse ""\nP2,61,none\n')
    with pytest.raises(FolderError, match="line 2 to 4: unexpected end"):
        CsvTable(table).records()
    table.write_text(f'{THREE}\nP1,60,"severe\nP2,61,none\nP3,62,bad"\n')
    with pytest.raises(FolderError, match="line 2 to 4: a quote makes one row of lines"):
        CsvTable(table).records()
    table.write_text('pid,note,seen\nP1,"Pain, since\nMay, and worse",yes\nP2,none,no\n')
    assert [row for _, row in CsvTable(table).records()][1:] == [
        ["P1", "Pain, since\nMay, and worse", "yes"],
        ["P2", "none", "no"],
    ]


@pytest.mark.parametrize("row", HONEST)
def test_other_quotes_and_cells_of_several_lines_are_read(row: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [row, *OTHERS])
    assert len(node_table(folder, "folder")[0]) == 1 + len(OTHERS)
