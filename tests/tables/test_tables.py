"""A table before its first run: a proposed description, the split by owner, and a project that
starts there."""

from __future__ import annotations

import csv
import re
import tomllib
from pathlib import Path

import pytest

from discreet.data.csv_table import CsvTable
from discreet.data.datasets import load_task
from discreet.data.targets import FolderError
from discreet.tables.owner_split import is_tested, split_by_owner
from discreet.tables.proposal import guessed_column, propose
from tests.command import data, new
from tests.tables.made_tables import HEAD, write_table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "hospital.csv", 60)


def test_a_proposal_is_a_description_that_reads_the_table_once_it_is_confirmed(table: Path) -> None:
    proposal = propose(CsvTable(table), target="readmitted")
    described = tomllib.loads(proposal.text)
    assert (described["owner"], described["decimal"], described["classes"]) == (
        "patient_id",
        ",",
        ["no", "yes"],
    )
    assert {*described["columns"]} == {"visit_date", "age", "sex", "ward", "hba1c"}
    assert "# note is left out: text of" in proposal.text
    assert described["columns"]["hba1c"]["missing"] == "middle"
    assert described["columns"]["visit_date"]["format"] == "%d.%m.%Y"
    (table.parent / "data.toml").write_text(re.sub("(?m)^unconfirmed.*$", "", proposal.text))
    assert (
        len(load_task("folder", path=str(table.parent)).train)
        == len(table.read_text().splitlines()) - 1
    )
    assert proposal.num_owners == 60


def test_a_proposal_says_first_what_is_not_private_and_names_every_column_to_replace(
    table: Path,
) -> None:
    proposal = propose(CsvTable(table), target="readmitted")
    head = " ".join(line.lstrip("# ") for line in proposal.text.splitlines()[:4])
    assert "which it has READ" in head
    assert (
        "They are not private, and no epsilon covers them. Replace them, column by column" in head
    )
    assert {*tomllib.loads(proposal.text)["unconfirmed"]} == {*proposal.unconfirmed}
    assert {*proposal.unconfirmed} == {"visit_date", "age", "sex", "ward", "hba1c", "readmitted"}
    (table.parent / "data.toml").write_text(proposal.text)
    with pytest.raises(FolderError, match="unconfirmed lists visit_date, age"):
        load_task("folder", path=str(table.parent))


@pytest.mark.parametrize(
    ("name", "cells", "line"),
    [
        ("flag", ["0", "1"] * 9, "[0, 1]"),
        ("age", ["19", "93"] * 9, "[10, 100]"),
        (
            "level",
            ["1.5", "", "2.5"] * 9,
            '{ kind = "number", low = 1, high = 3, missing = "middle" }',
        ),
        ("day", ["2021-03-04"] * 9, '{ kind = "date", low = 2021-01-01, high = 2021-12-31 }'),
        ("day", ["04/13/2021", ""] * 9, 'format = "%m/%d/%Y", missing = "middle" }'),
        ("sex", ["M", "F"] * 9, '["F", "M"]'),
        ("case_id", [str(number) for number in range(40)], ""),
        ("empty", ["", "NA"], ""),
    ],
)
def test_the_kind_of_a_column_is_guessed_from_its_cells(
    name: str, cells: list[str], line: str
) -> None:
    found = guessed_column(name, cells, ".").line
    assert found == line if line in ("", found) else found.endswith(line)


def test_all_rows_of_an_owner_are_unchanged_in_one_part_and_the_same_each_time(
    table: Path,
) -> None:
    found = split_by_owner(CsvTable(table), owner="patient_id", share=0.3)
    texts = [path.read_text().splitlines() for path in (found.train, found.test)]
    parts = [list(csv.DictReader(text, delimiter=";")) for text in texts]
    owners = [{row["patient_id"] for row in part} for part in parts]
    assert owners[0] & owners[1] == set()
    assert owners[1] == {name for name in owners[0] | owners[1] if is_tested(name, 0.3)}
    assert sorted(texts[0][1:] + texts[1][1:]) == sorted(
        table.read_text("utf-8-sig").splitlines()[1:]
    )
    assert (len(owners[0]), len(owners[1])) == found.owners
    with pytest.raises(FolderError, match=r"train\.csv is there already"):
        split_by_owner(CsvTable(table), owner="patient_id", share=0.3)


@pytest.mark.parametrize(
    ("words", "rows", "said"),
    [
        (["--owner", "person"], [], "has no column person; there are patient_id"),
        (["--owner", "patient_id"], [";1;2;3;4;5;6;no"], "line 2: patient_id is empty"),
        (["--owner", "patient_id"], ["P1;1"], "line 2: 2 columns, and the header has 8"),
        (["--test", "1.5"], [], "--test must be a share within"),
    ],
)
def test_what_can_not_be_split_is_told(
    words: list[str], rows: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("\n".join([HEAD, *rows, "P9;1;2;3;4;5;6;no"]))
    assert data(["split", str(tmp_path / "a.csv"), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_project_starts_from_a_table_that_nothing_reads(table: Path, tmp_path: Path) -> None:
    assert new([str(tmp_path / "my-ward"), "--table", str(table)]) == 0
    project = tmp_path / "my-ward"
    assert [path.name for path in (project / "data").iterdir()] == ["hospital.csv"]
    assert "experiment=table" in (project / "README.md").read_text()
    assert (project / "conf" / "experiment" / "table.yaml").is_file()
    assert "data/*.csv" in (project / ".gitignore").read_text()
    assert new([str(tmp_path / "other"), "--table", str(tmp_path / "none.csv")]) == 2
