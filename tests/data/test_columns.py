"""Tables as people have them: cells to numbers by what is public of each column, and what is
refused, by line."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.data.cells import owner_numbers
from discreet.data.columns import columns_of
from discreet.data.description import description_of
from discreet.data.encoding import column_names, encoded_columns
from discreet.data.examples import normalised_inputs
from discreet.data.folder import load_folder, node_table
from discreet.data.targets import FolderError
from discreet.server.spread import spread_of

HEAD = "patient;visit;age;hba1c;ward;seen;readmitted"
ROWS = [
    "P1;1;40;6,0;cardiology;31.12.2022;no",
    "P1;2;60;;surgery;01.01.2022;yes",
    "P2;1;100;14,5;dentist;16.05.2022;no",
]
TOML = """format = "csv"
file = "train.csv"
test = "test.csv"
target = "readmitted"
classes = ["no", "yes"]
owner = "patient"
decimal = ","

[columns]
age = [20, 100]
ward = ["surgery", "cardiology"]
hba1c = { kind = "number", low = 3, high = 13, missing = "middle" }
seen = { kind = "date", low = 2022-01-01, high = 2022-12-31, format = "%d.%m.%Y" }
"""


def write(folder: Path, rows: list[str], *, toml: str = TOML, encoding: str = "utf-8") -> Path:
    (folder / "train.csv").write_bytes("\n".join([HEAD, *rows]).encode(encoding))
    (folder / "test.csv").write_text("\n".join([HEAD, "Q1;1;60;8,0;surgery;01.01.2022;yes"]))
    (folder / "data.toml").write_text(toml)
    return folder


def refused(folder: Path, rows: list[str], *, toml: str = TOML, encoding: str = "utf-8") -> str:
    with pytest.raises(FolderError) as error:
        load_folder(str(write(folder, rows, toml=toml, encoding=encoding)))
    return str(error.value)


def test_a_messy_table_becomes_the_numbers_that_its_description_says(tmp_path: Path) -> None:
    task = load_folder(str(write(tmp_path, ROWS)))
    # age, surgery, cardiology, another, hba1c, hba1c is empty, seen
    wanted = [
        [-0.5, 0, 1, 0, -0.4, 0, 1],
        [0, 1, 0, 0, 0, 1, -1],
        [1, 0, 0, 1, 1, 0, 135 / 364 * 2 - 1],
    ]
    assert task.train.inputs.numpy() == pytest.approx(np.array(wanted), abs=1e-6)
    assert task.train.targets.tolist() == [0, 1, 0]
    assert task.owners is not None
    assert task.owners.tolist() == owner_numbers(np.array(["P1", "P1", "P2"])).tolist()
    assert task.test.inputs.tolist()[0][:4] == [0, 1, 0, 0]


def test_a_table_without_a_column_to_predict_from_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("patient,y\nP1,0\nP2,1\n")
    lines = ('format = "csv"', 'file = "train.csv"', 'target = "y"', 'owner = "patient"')
    (tmp_path / "data.toml").write_text("\n".join([*lines, "num_classes = 2"]))
    with pytest.raises(FolderError, match="has no inputs"):
        load_folder(str(tmp_path))


def test_truth_values_as_pandas_reads_them_are_the_levels_of_the_table() -> None:
    columns = columns_of({"smoker": ["FALSE", "TRUE"]})
    read = encoded_columns({"smoker": [True, np.bool_(False)]}, columns)
    assert read.tolist() == encoded_columns({"smoker": ["TRUE", "FALSE"]}, columns).tolist()
    assert read.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_spaces_around_the_name_of_an_owner_make_no_second_person(tmp_path: Path) -> None:
    spaced = [ROWS[0], ROWS[1].replace("P1;", " P1 ;"), ROWS[2]]
    task = load_folder(str(write(tmp_path, spaced)))
    assert task.owners is not None
    assert task.owners.tolist() == owner_numbers(np.array(["P1", "P1", "P2"])).tolist()
    with pytest.raises(FolderError, match=r"patient has rows in train\.csv"):
        load_folder(str(write(tmp_path, [*ROWS, ROWS[0].replace("P1;", "Q1 ;")])))


def test_an_owner_is_the_same_as_a_number_and_as_text(tmp_path: Path) -> None:
    toml = 'format = "csv"\nfile = "train.csv"\ntest = "test.csv"\ntarget = "y"\nowner = "who"\n'
    (tmp_path / "data.toml").write_text(toml + "num_classes = 2\n")
    (tmp_path / "train.csv").write_text("who,x,y\n007,1,0\n008,2,1\n")
    (tmp_path / "test.csv").write_text("who,x,y\nA7,1,0\n007,2,1\n")
    with pytest.raises(FolderError, match=r"line 3: .*who has rows in train\.csv"):
        load_folder(str(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_found(encoding: str, tmp_path: Path) -> None:
    plain = load_folder(str(write(tmp_path, ROWS)))
    marked = load_folder(str(write(tmp_path, ROWS, encoding=encoding)))
    assert torch.equal(plain.train.inputs, marked.train.inputs)


def test_a_description_that_windows_has_saved_is_read(tmp_path: Path) -> None:
    plain = load_folder(str(write(tmp_path, ROWS)))
    description = tmp_path / "data.toml"
    description.write_bytes(TOML.replace("\n", "\r\n").encode("utf-8-sig"))
    assert torch.equal(plain.train.inputs, load_folder(str(tmp_path)).train.inputs)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            "P3;1;;6,0;surgery;01.01.2022;no",
            'age is empty: write missing = "middle"',
        ),
        (
            "P3;1;HIV;6,0;surgery;01.01.2022;no",
            "age is not .*kind = category",
        ),
        (
            "P3;1;1.040,5;6,0;surgery;01.01.2022;no",
            "age is not .*thousands separators",
        ),
        (
            "P3;1;40;6,0;;01.01.2022;no",
            'ward is empty: write missing = "category"',
        ),
        (
            "P3;1;40;6,0;surgery;2022-01-01;no",
            "seen is not a date in the format %d.%m.%Y",
        ),
        ("P3;1;40;6,0;surgery;01.01.2022;", "readmitted is empty"),
        (
            "P3;1;40;6,0;surgery;01.01.2022;HIV",
            "readmitted is not one of classes",
        ),
        (";1;40;6,0;surgery;01.01.2022;no", "patient is empty"),
        ("P3;1;40;6,0;surgery;01.01.2022", "6 columns, .*header has 7"),
        (
            "Q1;1;40;6,0;surgery;01.01.2022;no",
            "this patient has rows in train.csv too, as 1 in all have",
        ),
    ],
)
def test_a_cell_that_can_not_be_read_is_told_by_its_line_and_never_shown(
    row: str, said: str, tmp_path: Path
) -> None:
    message = refused(tmp_path, [*ROWS, row])
    file, line = ("test.csv", 2) if row.startswith("Q1") else ("train.csv", 5)
    assert re.search(re.escape(f"{tmp_path / file}, line {line}: ") + said, message)
    assert "HIV" not in message
    assert "\n" not in message


def test_decimal_commas_and_another_encoding_are_asked_for(tmp_path: Path) -> None:
    points = TOML.replace('decimal = ","\n', "")
    assert 'decimal = "," in data.toml' in refused(tmp_path, ROWS, toml=points)
    umlaut = [ROWS[0].replace("cardiology", "Chirurgie für Kinder")]
    message = refused(tmp_path, umlaut, encoding="cp1252")
    assert 'it is not utf-8: write encoding = "cp1252" in data.toml' in message
    task = load_folder(
        str(write(tmp_path, umlaut, toml=f'encoding = "cp1252"\n{TOML}', encoding="cp1252"))
    )
    assert len(task.train) == 1


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"age": {"kind": "number"}}, "age: low and high are missing"),
        (
            {"age": {"kind": "number", "low": 0, "hihg": 1}},
            "age: unknown key hihg; did you mean high",
        ),
        ({"age": [3, 2]}, "age: high must .*low"),
        ({"age": [100, 100.00000000000001]}, "age: high must .*low"),
        ({"age": [0, 1e-320]}, "age: high must .*low"),
        ({"sex": {"kind": "category"}}, "sex: levels must be given"),
        (
            {"sex": {"kind": "category", "levels": ["F"], "low": 0}},
            "sex: low .*kind = category",
        ),
        (
            {"seen": {"kind": "date", "low": "yesterday", "high": "2022-01-01"}},
            "seen: a public day",
        ),
        ({"note": {"kind": "text"}}, "note: width must be given"),
        ({"id": "number"}, "id: write its kind"),
    ],
)
def test_a_column_that_is_described_wrongly_is_refused(
    columns: dict[str, object], said: str
) -> None:
    with pytest.raises(FolderError, match=f"columns: {said}"):
        description_of(
            {"format": "csv", "file": "a.csv", "target": "y", "num_classes": 2, "columns": columns}
        )


def test_what_was_read_from_the_data_is_refused_until_somebody_has_replaced_it(
    tmp_path: Path,
) -> None:
    assert "unconfirmed lists age, ward" in refused(
        tmp_path, ROWS, toml=f'unconfirmed = ["age", "ward"]\n{TOML}'
    )


def test_cells_of_every_kind_are_encoded_alike_from_text_and_from_values() -> None:
    columns = columns_of(
        {
            "n": {"kind": "number", "low": -1, "high": 1, "missing": 0.5},
            "c": {"kind": "category", "levels": ["1", "2"], "missing": "category"},
            "d": {"kind": "date", "low": "2020-01-01", "high": "2020-01-03", "missing": "middle"},
            "t": {"kind": "text", "width": 4},
        }
    )
    text = {"n": ["0,25", ""], "c": ["1", "NA"], "d": ["2020-01-02", ""], "t": ["Fever, fever", ""]}
    values = {
        "n": [0.25, None],
        "c": [1.0, None],
        "d": [date(2020, 1, 2), None],
        "t": ["fever FEVER", None],
    }
    found = encoded_columns(text, columns, decimal=",")
    assert np.array_equal(found, encoded_columns(values, columns))
    assert found[:, :8].tolist() == [[0.25, 0, 1, 0, 0, 0, 0, 0], [0.5, 1, 0, 0, 0, 1, 0, 1]]
    assert np.abs(found[:, 8:]).sum(axis=1).tolist() == [1, 0]
    assert len(column_names(columns)) == found.shape[1]
    assert columns_of({column.name: column.facts() for column in columns}) == columns


def test_a_number_bends_by_curves_after_its_points_are_spread() -> None:
    described = {"kind": "number", "low": 0, "high": 10, "curves": 2, "missing": "middle"}
    plain, pointed = (
        encoded_columns({"x": [1.0, 4.0, 99.0, None]}, columns_of({"x": described | more}))
        for more in ({}, {"points": [0, 1, 4, 10]})
    )
    # (2 x^2 - 1) / 2 and (4 x^3 - 3 x) / 3 by hand
    assert plain[:, 0].tolist() == pytest.approx([-0.8, -0.2, 1, 0])
    assert plain[:, 1].tolist() == pytest.approx([0.14, -0.46, 0.5, -0.5])
    assert plain[:, 2].tolist() == pytest.approx([0.352 / 3, 0.568 / 3, 1 / 3, 0])
    assert pointed[:3, 0].tolist() == pytest.approx([-1 / 3, 1 / 3, 1])
    assert pointed[:3, 1].tolist() == pytest.approx([-7 / 18, -7 / 18, 0.5])
    assert plain[:, 3].tolist() == pointed[:, 3].tolist() == [0, 0, 0, 1]


def test_bins_are_groups_and_a_pair_is_the_products_of_its_columns() -> None:
    columns = columns_of(
        {
            "age": {"kind": "number", "low": 0, "high": 100, "bins": [18, 65]},
            "dose": {"kind": "number", "low": 0, "high": 8, "curves": 3},
            "sex": ["F", "M"],
        }
    )
    pairs = [("age", "sex"), ("dose", "sex")]
    found = encoded_columns(
        {"age": [17.9, 18, 65, 400], "dose": [0, 2, 4, 6], "sex": ["F", "M", "?", "F"]},
        columns,
        pairs,
    )
    names = column_names(columns, pairs)
    assert found.shape == (4, len(names))
    said = [[name for name, value in zip(names, row, strict=True) if value == 1] for row in found]
    assert said[1][:3] == ["age 18 to 65", "sex is M", "age 18 to 65 and sex is M"]
    assert [row[0] for row in said] == [
        *("age below 18", "age 18 to 65"),
        *("age from 65", "age from 65"),
    ]
    crossed = found[:, names.index("dose and sex is F") :]
    assert crossed.tolist() == [[-1, 0, 0], [0, -0.5, 0], [0, 0, 0], [0.5, 0, 0]]
    assert columns_of({column.name: column.facts() for column in columns}) == columns


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"curves": 99}, r"curves must be .*20\b"),
        ({"points": [0, 5, 5, 10]}, "points must rise"),
        ({"points": [1, 10]}, "points must begin at low"),
        ({"bins": [0, 4]}, "bins must .*low and high"),
        ({"bins": [4], "curves": 2}, "bins can't be combined"),
    ],
)
def test_a_wrong_bend_is_told_with_its_column(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"x: {said}"):
        columns_of({"x": {"kind": "number", "low": 0, "high": 10} | wrong})


@pytest.mark.parametrize("pair", ['["age", "age"]', '["age", "weight"]', '["age"]', '"age"'])
def test_a_pair_must_be_two_columns(pair: str, tmp_path: Path) -> None:
    assert "pairs" in refused(tmp_path, ROWS, toml=f"{TOML}\n[[pairs]]\ncolumns = {pair}\n")


def test_an_array_of_owners_in_an_npz_file_says_whose_each_row_is(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text(
        'format = "npz"\nfile = "train.npz"\ntarget = "y"\nnum_classes = 2\n'
    )
    arrays = {"inputs": np.zeros((4, 2)), "y": np.array([0, 1, 0, 1])}
    np.savez(tmp_path / "train.npz", **arrays, owners=np.array(["b", "a", "b", "c"]))
    found, _ = node_table(tmp_path, "folder")
    assert found.owners is not None
    assert found.owners.tolist() == owner_numbers(np.array(["b", "a", "b", "c"])).tolist()
    np.savez(tmp_path / "train.npz", **arrays, owners=np.array(["b", "a", "b"]))
    with pytest.raises(FolderError, match="4 rows of inputs, but 3 owners"):
        load_folder(str(tmp_path))


def test_numbers_spread_over_six_deviations_and_flags_are_0_and_1() -> None:
    columns = columns_of(
        {
            "age": [0, 100],
            "sex": ["F", "M"],
            "flag": [0, 1],
            "seen": {
                "kind": "date",
                "low": "2020-01-01",
                "high": "2020-01-03",
                "missing": "middle",
            },
        }
    )
    table = {"age": ["75"], "sex": ["M"], "flag": ["1"], "seen": ["2020-01-01"]}
    described = description_of({"format": "csv", "file": "a", "target": "y"}).model_copy(
        update={"columns": columns}
    )
    encoded = torch.from_numpy(encoded_columns(table, columns)).float()
    by = spread_of(described, encoded.shape[1])
    assert normalised_inputs(encoded, by).tolist() == [[1.5, 0.0, 1.0, 0.0, 1.0, -3.0, 0.0]]


def test_ranges_alone_are_enough_for_the_same_spread_and_without_any_it_is_refused() -> None:
    given = {"format": "csv", "file": "a", "target": "y", "low": (0, 0), "high": (50, 1)}
    by = spread_of(description_of(given), 2)
    assert (by.means, by.deviations) == ([0.0, -1.0], [1 / 3, 2.0])
    with pytest.raises(ValueError, match="needs the public ranges"):
        spread_of(description_of({"format": "csv", "file": "a", "target": "y"}), 2)
