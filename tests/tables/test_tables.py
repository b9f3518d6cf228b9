"""A table before its first run: a proposed description, the split by owner, and a project that
starts there."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from discreet.data.cell_reading import Marks
from discreet.data.csv_table import CsvTable
from discreet.data.datasets import load_task
from discreet.data.targets import FolderError
from discreet.tables.owner_split import is_tested, split_by_owner
from discreet.tables.proposal import guessed_column, propose
from tests.command import data, new
from tests.tables.made_tables import HEAD, TOML, write_table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "hospital.csv", 60)


def test_a_proposal_is_a_description_that_reads_the_table_once_it_is_confirmed(table: Path) -> None:
    proposal = propose(CsvTable(table), target="readmitted", owner=None)
    described = tomllib.loads(proposal)
    assert (described["owner"], described["decimal"], described["classes"]) == (
        "patient_id",
        ",",
        ["no", "yes"],
    )
    assert {*described["columns"]} == {"visit_date", "age", "sex", "ward", "hba1c"}
    assert "# note is left out: text of" in proposal
    assert described["columns"]["hba1c"]["missing"] == "middle"
    assert described["columns"]["visit_date"]["format"] == "%d.%m.%Y"
    (table.parent / "data.toml").write_text(re.sub("(?m)^unconfirmed.*$", "", proposal))
    assert (
        len(load_task("folder", path=str(table.parent)).train)
        == len(table.read_text().splitlines()) - 1
    )


def test_a_table_that_has_changed_is_read_anew_in_the_same_process(table: Path) -> None:
    proposal = propose(CsvTable(table), target="readmitted", owner=None)
    (table.parent / "data.toml").write_text(re.sub("(?m)^unconfirmed.*$", "", proposal))
    before = load_task("folder", path=str(table.parent))
    assert load_task("folder", path=str(table.parent)) is before
    lines = table.read_text(encoding="utf-8-sig").splitlines()
    table.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8-sig")
    assert len(load_task("folder", path=str(table.parent)).train) == len(before.train) - 1


def test_a_proposal_says_first_what_is_not_private_and_names_every_column_to_replace(
    table: Path,
) -> None:
    proposal = propose(CsvTable(table), target="readmitted", owner=None)
    head = " ".join(line.lstrip("# ") for line in proposal.splitlines()[:5])
    assert "which it has READ" in head
    assert (
        "They are not private, and no epsilon covers them. Replace them, column by column" in head
    )
    named = tomllib.loads(proposal)["unconfirmed"]
    assert {*named} == {"visit_date", "age", "sex", "ward", "hba1c", "readmitted"}
    (table.parent / "data.toml").write_text(proposal)
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
        ("day", ["2021-03-04 10:30:00"] * 9, "low = 2021-01-01, high = 2021-12-31 }"),
        ("day", ["04.03.2021 10:30"] * 9, 'format = "%d.%m.%Y %H:%M" }'),
        ("pressure", ["110", "170", "-9", "140"] * 9, "[110, 180]"),
        ("sex", ["M", "F"] * 9, '["F", "M"]'),
        ("case_id", [str(number) for number in range(40)], ""),
        ("empty", ["", "NA"], ""),
    ],
)
def test_the_kind_of_a_column_is_guessed_from_its_cells(
    name: str, cells: list[str], line: str
) -> None:
    found = guessed_column(name, cells, Marks()).line
    assert found == line if line in ("", found) else found.endswith(line)


def test_all_rows_of_an_owner_are_unchanged_in_one_part_and_the_same_each_time(
    table: Path,
) -> None:
    found = split_by_owner(CsvTable(table), owner="patient_id", share=0.3)
    texts = [part.path.read_text().splitlines() for part in found]
    parts = [list(csv.DictReader(text, delimiter=";")) for text in texts]
    owners = [{row["patient_id"] for row in part} for part in parts]
    assert owners[0] & owners[1] == set()
    assert owners[1] == {name for name in owners[0] | owners[1] if is_tested(name, 0.3)}
    assert sorted(texts[0][1:] + texts[1][1:]) == sorted(
        table.read_text("utf-8-sig").splitlines()[1:]
    )
    assert [len(names) for names in owners] == [part.owners for part in found]
    again = split_by_owner(CsvTable(table), owner="patient_id", share=0.3)
    assert [part.path.read_text().splitlines() for part in again] == texts
    with pytest.raises(FolderError, match=r"train\.csv is there already"):
        split_by_owner(CsvTable(table), owner="patient_id", share=0.6)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "npz"])
@pytest.mark.parametrize("owner", ["id", None])
def test_a_table_of_another_form_is_split_like_the_csv_file(
    owner: str | None, form: str, tmp_path: Path
) -> None:
    ids = [f"P{row % 40}" for row in range(80)]
    (tmp_path / "a.csv").write_text("id,age\n" + "".join(f"{name},3\n" for name in ids))
    columns = {"id": ids, "age": [3] * len(ids)}
    if form == "jsonl":
        lines = [json.dumps({"id": name, "age": 3}) for name in ids]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
    elif form == "parquet":
        parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    else:
        np.savez(tmp_path / "a.npz", **{name: np.array(each) for name, each in columns.items()})
    made = [
        split_by_owner(CsvTable(tmp_path / name), owner=owner, share=0.4)
        for name in ("a.csv", f"a.{form}")
    ]
    counted = [[(part.rows, part.owners) for part in parts] for parts in made]
    assert counted[0] == counted[1]
    assert [part.path.name for part in made[1]] == [f"train.{form}", f"test.{form}"]
    train, test = (
        {*(tmp_path / name).read_text().split()[1:]} for name in ("train.csv", "test.csv")
    )
    assert not train & test  # copies of a row are in one part


@pytest.mark.parametrize(
    ("words", "rows", "said"),
    [
        (["--owner", "person"], [], "has no column person; there are patient_id"),
        (
            ["--owner", "patient_id"],
            [";1;2;3;4;5;6;no"],
            "line 2: the id in patient_id must",
        ),
        (["--owner", "patient_id"], ["P1;1"], "line 2: 2 columns, "),
        (["--test", "1.5"], [], "--test must be a"),
    ],
)
def test_what_can_not_be_split_is_told(
    words: list[str], rows: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("\n".join([HEAD, *rows, "P9;1;2;3;4;5;6;no"]))
    assert data(["split", str(tmp_path / "a.csv"), *words]) == 2
    assert said in capsys.readouterr().err


PLAIN = "patient;seen;age;dose;out\n"
MESSY = [f"P{row};0{row}.02.2022;{20 + row};{row},5;{'ab'[row % 2]}" for row in range(1, 9)]


def checked(folder: Path, content: bytes | str, *words: str) -> int:
    if isinstance(content, str):
        content = content.encode()
    (folder / "a.csv").write_bytes(content)
    return data(["check", str(folder / "a.csv"), *words])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "CSV file is empty"),
        (b"\n  \n", "CSV file is empty"),
        (PLAIN, "a.csv has no rows"),
        (PLAIN + "P1;1;2;3;a\nP2;1;2;3;a", "out says the same"),
        (PLAIN.replace(";", "^") + "P1^1^2^3;4^a", "give it with --separator"),
        (PLAIN.replace("dose", "age") + MESSY[0], "'age' occurs twice: rename one"),
        (b"PK\x03\x04zip", "save it as CSV (UTF-8)"),
        ((PLAIN + MESSY[0]).encode("utf-16-le"), 'write encoding = "utf-16-le" in data.toml'),
        ((PLAIN + "P\0;1;2;3;a").encode(), "has a zero byte: it is damaged"),
        ((PLAIN + "P\xfc;1;2;3;a").encode("cp1252"), "--encoding with `discreet"),
    ],
)
def test_a_file_that_is_no_table_is_told_in_one_line_with_what_to_do(
    content: bytes | str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path, content) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "a.csv") in line
    assert said in line


@pytest.mark.parametrize("odd", ["<5", "-", "7 mg"])
def test_a_target_of_numbers_with_another_cell_is_told_and_is_no_list_of_classes(
    odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"P{row};01.02.2022;{20 + row};1.5;{odd if row == 7 else row}" for row in range(1, 30)]
    assert checked(tmp_path, PLAIN + "\n".join(rows)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "column out has" in line


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_utf_8_read_as_utf_16_shows_nothing_of_the_table(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = PLAIN + "\n".join(MESSY)
    for text in (rows, rows + "    "[: -len(rows) % 4]):
        assert checked(tmp_path, text, "--encoding", encoding) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"UTF-8, and not {encoding}" in line


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_utf_8_is_not_read_as_another_encoding(
    encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = PLAIN.replace("dose", "d\xf6se") + "\n".join(MESSY)
    assert checked(tmp_path, rows, "--encoding", encoding) == 2
    assert f"UTF-8, and not {encoding}" in capsys.readouterr().err
    (tmp_path / "a.csv").write_bytes(rows.encode(encoding))
    assert data(["check", str(tmp_path / "a.csv"), "--encoding", encoding]) == 0
    assert data(["check", str(tmp_path / "a.csv"), "--encoding", "utf-8"]) == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("04.02.2022", "04/2/2022?", "# seen is left out: line 5 of a.csv is not a date"),
        (";24;", ";old;", "# age is left out: line 5 of a.csv is not a number"),
        ("4,5", "1.004,5", 'thousands = "."           # 1.234 is read as 1234'),
        (";a", ";A", "only in capitals"),
    ],
)
def test_a_cell_that_keeps_a_column_from_its_kind_is_named_by_its_line(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*MESSY[:3], MESSY[3].replace(old, new), *MESSY[4:]]
    assert checked(tmp_path, PLAIN + "\n".join(rows), "--target", "out") == 0
    assert said in capsys.readouterr().out


def described(table: Path, given: str) -> Path:
    """The whole table as train.csv, beside this description without a test set."""
    train = table.rename(table.with_name("train.csv"))
    (train.parent / "data.toml").write_text(given.replace('test = "test.csv"\n', ""))
    return train


def test_a_description_that_is_there_counts_and_cells_outside_its_ranges_are_counted(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = described(table, TOML.replace("[0, 100]", "[0, 60]"))
    rows = csv.DictReader(train.read_text("utf-8-sig").splitlines(), delimiter=";")
    old = sum(int(row["age"]) > 60 for row in rows)
    assert data(["check", str(train), "--owner", "sex", "--write"]) == 0
    said = capsys.readouterr().out
    assert "counts, not --owner" in said
    assert f"age: {old} cells are outside low..high" in said
    assert "visit_date: " not in said


def test_a_table_without_owners_starts_with_each_row_as_a_client(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = described(table, TOML.replace('owner = "patient_id"\n', ""))
    assert data(["check", str(train)]) == 0
    rows = len(train.read_text().splitlines()) - 1
    said = capsys.readouterr().out
    assert "each row becomes a client" in said
    assert f"data.partition=iid data.num_clients={rows}" in said


def test_check_proposes_curves_for_numbers_and_points_for_skewed_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{age};{3 ** (age % 7)};{age % 2};yes" for age in range(20, 80)]
    written = "\n".join(["age;crp;flag;out", *rows, "20;1;0;no"])
    assert checked(tmp_path, written, "--target", "out", "--write") == 0
    said = capsys.readouterr().out
    assert 'age = { kind = "number", low = 20, high = 80, curves = 3 }\n' in said
    assert "curves = 3 }  # skewed: points = [...], public quantiles" in said
    assert "flag = [0, 1]\n" in said
    assert "# [[pairs]]" in said


def test_a_file_that_data_toml_does_not_describe_is_not_said_to_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = PLAIN + "\n".join(MESSY)
    assert checked(tmp_path, table, "--target", "out", "--write") == 0
    described = (tmp_path / "data.toml").read_text()
    confirmed = re.sub("unconfirmed = .*", "unconfirmed = []", described)
    (tmp_path / "data.toml").write_text(confirmed)
    (tmp_path / "b.csv").write_text(table.replace("21", "unknown"))
    assert data(["check", str(tmp_path / "b.csv")]) == 2
    assert "describes a.csv, not b.csv" in capsys.readouterr().err


@pytest.mark.parametrize("mark", ["\t", "|", "^", "sep"])
def test_every_separator_is_found_or_can_be_given(
    mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAIN + "\n".join(MESSY)
    words = ["--separator", "^"] if mark == "^" else []
    written = f"sep=;\n{text}" if mark == "sep" else text.replace(";", mark)
    assert checked(tmp_path, written, "--target", "out", "--write", *words) == 0
    assert data(["split", str(tmp_path / "a.csv"), "--owner", "patient", *words]) == 0
    described = tomllib.loads((tmp_path / "data.toml").read_text())
    assert {*described["columns"]} == {"seen", "age", "dose"}
    assert described.get("separator") == (words[1] if words else None)


def test_lines_of_wrong_cells_in_many_columns_take_one_pass_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{row},{row + 0.5},{row % 2}" for row in range(8)]
    (tmp_path / "a.csv").write_text("\n".join(["age,weight,sick", *rows, "old,heavy,1"]))
    real, passes = CsvTable.records, list[CsvTable]()
    monkeypatch.setattr(
        CsvTable, "records", lambda table: passes.append(table) or real(table), raising=True
    )
    text = propose(CsvTable(tmp_path / "a.csv"), target="sick", owner=None)
    assert text.count("is left out: line 10 of a.csv is not a number") == 2
    assert len(passes) == 1


def test_spaces_around_names_of_columns_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAIN.replace(";", " ; ") + "\n".join(MESSY).replace(";", " ; ")
    assert checked(tmp_path, text, "--target", "out", "--owner", "patient", "--write") == 0
    toml = (tmp_path / "data.toml").read_text()
    (tmp_path / "data.toml").write_text(re.sub("(?m)^unconfirmed.*$", "", toml))
    task = load_task("folder", path=str(tmp_path))
    assert (len(task.train), task.train.targets.tolist()[:2]) == (8, [1, 0])


def test_a_table_is_read_without_threads_that_outlive_it(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", 20)
    code = (
        "import os, pathlib, pyarrow.csv\nfrom discreet.data.csv_table import CsvTable\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "CsvTable(pathlib.Path('a.csv')).columns()\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1  # the one that reads the file


def test_a_project_starts_from_a_table_that_nothing_reads(table: Path, tmp_path: Path) -> None:
    assert new([str(tmp_path / "my-ward"), "--table", str(table)]) == 0
    project = tmp_path / "my-ward"
    assert [path.name for path in (project / "data").iterdir()] == ["hospital.csv"]
    assert "experiment=table" in (project / "README.md").read_text()
    for name in ("table", "hospitals"):
        assert (project / "conf" / "experiment" / f"{name}.yaml").is_file()
    assert "data/*.csv" in (project / ".gitignore").read_text()
    assert new([str(tmp_path / "other"), "--table", str(tmp_path / "none.csv")]) == 2
