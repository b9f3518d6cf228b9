"""Cells as hospitals write them: declared and read, or refused; nothing is guessed in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.data.cell_reading import CellError
from discreet.data.columns import CHAPTERS, columns_of
from discreet.data.description import description_of
from discreet.data.encoding import column_names, encoded_columns
from discreet.data.folder import load_folder
from discreet.data.site_agreement import agreed_of
from discreet.data.targets import FolderError

NUMBER = {"kind": "number", "low": 0, "high": 2000}
DATE = {"kind": "date", "low": "2020-01-01", "high": "2022-12-31"}


def encoded(cells: list[object], facts: dict[str, object], **marks: str) -> list[list[float]]:
    return encoded_columns({"x": cells}, columns_of({"x": facts}), **marks).round(6).tolist()


def refusal(cells: list[object], facts: dict[str, object], **marks: str) -> str:
    with pytest.raises(CellError) as error:
        encoded(cells, facts, **marks)
    return str(error.value)


def test_words_for_an_empty_cell_are_declared_and_anything_else_is_refused() -> None:
    facts = NUMBER | {"missing": "middle", "empty": ["k.A.", "-9"]}
    assert encoded(["2000", "K.A.", "-9", "n/a"], facts) == [[1, 0], [0, 1], [0, 1], [0, 1]]
    assert "row 1: x is not a number" in refusal(["1", "k.A."], NUMBER | {"missing": "middle"})
    assert 'write missing = "middle"' in refusal(["k.A."], NUMBER | {"empty": ["k.A."]})
    words = {"kind": "category", "levels": ["a"], "missing": "category", "empty": ["-"]}
    assert encoded(["a", "-", "b"], words) == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_a_number_below_a_limit_counts_as_half_of_it_with_a_flag() -> None:
    facts = NUMBER | {"below": "half", "missing": "middle", "factor": 10}
    columns = columns_of({"x": facts})
    assert column_names(columns) == ["x", "x is below", "x is empty"]
    found = encoded(["<20", "\u2264 20", "10", ""], facts)
    assert found == [[-0.9, 1, 0], [-0.9, 1, 0], [-0.9, 0, 0], [0, 0, 1]]
    assert 'write below = "half"' in refusal(["<0,5"], NUMBER, decimal=",")
    assert columns_of({column.name: column.facts() for column in columns}) == columns


def test_a_unit_is_cut_off_and_another_one_is_refused() -> None:
    facts = NUMBER | {"unit": "mg/l", "below": "half"}
    assert encoded(["1000 mg/l", "1000mg/l", "1000", "<2000 mg/l"], facts) == [
        *([[0, 0]] * 3),
        [0, 1],
    ]
    assert "is not a number" in refusal(["5 g/l"], facts)


@pytest.mark.parametrize(
    ("cell", "marks", "number"),
    [
        ("1.234", {"decimal": ","}, None),
        ("1.234", {"decimal": ",", "thousands": "."}, 1234),
        ("1.234,5", {"decimal": ",", "thousands": "."}, 1234.5),
        ("1.23", {"decimal": ",", "thousands": "."}, None),
        ("1,234", {}, None),
        ("1,234.5", {"thousands": ","}, 1234.5),
        ("1,23", {"thousands": ","}, None),
        ("1.5,000", {"thousands": ","}, None),
        ("1 234", {"thousands": " "}, 1234),
        ("1'234", {"thousands": "'"}, 1234),
        ("1_000", {}, None),
        ("\u0661\u0662", {}, None),
        ("\uff11\uff12", {}, None),
        ("inf", {}, None),
        ("0x10", {}, None),
        ("+1.5e2", {}, 150),
        (".5", {}, 0.5),
        ("1e308", {}, 2000),
    ],
)
def test_a_number_is_read_by_its_marks_alone_or_refused(
    cell: str, marks: dict[str, str], number: float | None
) -> None:
    if number is None:
        assert "is not a number" in refusal([cell], NUMBER, **marks)
    else:
        assert encoded([cell], NUMBER, **marks) == [[round(number / 1000 - 1, 6)]]


def test_a_decimal_point_beside_decimal_commas_is_told_as_that() -> None:
    assert "have a decimal comma" in refusal(["8.5"], NUMBER, decimal=",")
    assert "thousands" in refusal(["8.500"], NUMBER, decimal=",")
    assert "kind = category" in refusal(["eight"], NUMBER, decimal=",")


def test_several_formats_of_dates_are_declared_and_a_day_that_is_two_is_refused() -> None:
    facts = DATE | {"format": ["%d.%m.%Y", "%Y-%m-%d"]}
    same = encoded(["31.12.2021", "2021-12-31"], facts)
    assert same[0] == same[1]
    both = DATE | {"format": ["%d/%m/%Y", "%m/%d/%Y"]}
    assert encoded(["31/12/2021", "12/31/2021", "03/03/2021"], both)[0] == same[0]
    assert "another day in each" in refusal(["02/03/2021"], both)


@pytest.mark.parametrize("cell", ["20211231", "2021-W05-1", "\u0662021-12-31", "31.12.2021"])
def test_a_day_without_a_format_is_written_as_iso_has_it(cell: str) -> None:
    assert "not a date such as 2022-01-31" in refusal([cell], DATE)


def test_digits_of_another_script_are_no_date() -> None:
    facts = DATE | {"format": "%d.%m.%Y"}
    assert "is not a date" in refusal(["\u0663\u0661.12.2021"], facts)


def test_codes_of_icd_are_folded_to_their_chapters() -> None:
    (column,) = columns_of({"x": {"kind": "category", "fold": "icd10"}})
    assert column.levels == CHAPTERS
    found = encoded_columns({"x": ["I21.4", "i10", "D49", "D50.1", "I00-I99", "??"]}, [column])
    named = [column.outputs[place] for place in found.argmax(axis=1)]
    assert named == [
        *["x is I00-I99"] * 2,
        *("x is C00-D49", "x is D50-D89", "x is I00-I99", "x is another"),
    ]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"kind": "category", "levels": 5}, "levels must be a list"),
        ({"kind": "text", "width": "a"}, "width must be .*whole"),
        ({"kind": "text", "width": 10**9}, r"width must be .*\[2, 65536\]"),
        (DATE | {"format": 5}, "format must be a text"),
        (NUMBER | {"low": 10**400}, "low must be a number"),
        (NUMBER | {"low": True}, "low must be a number"),
        (NUMBER | {"curves": 1.5}, "curves must be .*whole"),
        (NUMBER | {"points": "abc"}, "points must be a list"),
        (NUMBER | {"low": -1e308}, r"low must be .*\[-1e\+30, 1e\+30\]"),
        (NUMBER | {"factor": "a"}, "factor must be a number above 0"),
        (NUMBER | {"below": "all"}, 'below must be "half"'),
        (NUMBER | {"rises": "yes"}, "rises must be true or false"),
        (DATE | {"unit": "d"}, "unit .*kind = date"),
        ({"kind": "category", "levels": ["a"], "fold": "icd10"}, "levels of a fold"),
        ({"kind": "category", "levels": ["a"], "words": ["a"]}, "words must be a table"),
        ({"kind": ["number"]}, "kind must be a text"),
    ],
)
def test_a_key_of_another_kind_is_told_in_a_line(facts: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^x: {said}"):
        columns_of({"x": facts})


def written(folder: Path, text: str, toml: str) -> str:
    (folder / "train.csv").write_text(text)
    head = 'format = "csv"\nfile = "train.csv"\ntarget = "y"\n'
    (folder / "data.toml").write_text(head + toml)
    return str(folder)


def test_an_index_of_pandas_is_no_input(tmp_path: Path) -> None:
    text = ",age,y\n" + "".join(f"{row},{20 + row % 3},{row % 2}\n" for row in range(6))
    assert load_folder(written(tmp_path, text, "num_classes = 2\n")).shape.input_shape == (1,)
    # Its name alone decides: without a row its numbers have a gap.
    other = text.replace("\n3,", "\n9,")
    assert load_folder(written(tmp_path, other, "num_classes = 2\n")).shape.input_shape == (1,)


@pytest.mark.parametrize("cell", ["1_000", "\u0661\u0662", "1,5"])
def test_a_number_without_a_description_and_a_target_are_read_as_strictly(
    cell: str, tmp_path: Path
) -> None:
    table = f"x;y\n1;2\n3;{cell}\n"
    ranged = "target_low = 0\ntarget_high = 9\n"
    with pytest.raises(FolderError, match="line 3: y is not a number"):
        load_folder(written(tmp_path, table, ranged))
    with pytest.raises(FolderError, match="line 3: x is not a number"):
        load_folder(written(tmp_path, table.replace("x;y", "y;x"), ranged))


def test_thousands_are_declared_for_the_whole_file(tmp_path: Path) -> None:
    toml = (
        'decimal = ","\nthousands = "."\ntarget_low = 0\ntarget_high = 2000\n[columns]\n'
        "x = [0, 2000]\n"
    )
    task = load_folder(written(tmp_path, "x;y\n1.000;1.000,0\n0;0\n", toml))
    assert task.train.inputs.tolist() == [[0], [-1]]
    assert task.train.targets.tolist() == [[0], [-1]]
    with pytest.raises(FolderError, match=r"thousands must be .*than decimal"):
        load_folder(written(tmp_path, "x;y\n1;1\n", toml.replace('"."', '","')))


def test_a_site_writes_as_it_likes_and_agrees_on_what_a_model_must_know() -> None:
    def lines(more: dict[str, object]) -> list[str]:
        columns = {"x": NUMBER | more}
        given = {"format": "csv", "file": "a", "target": "y", "num_classes": 2}
        return agreed_of(description_of(given | {"columns": columns}))

    plain = lines({})
    assert lines({"unit": "mg/l", "empty": ["-"], "named": "z", "factor": 2.0}) == plain
    assert lines({"below": "half"}) != plain


@pytest.mark.parametrize("cell", ['{"a": 1}', "{}", "[1]", "[1, 2]", "[]"])
def test_an_owner_that_is_a_list_or_an_object_is_refused(cell: str, tmp_path: Path) -> None:
    row = f'{{"who": {cell}, "x": 1, "y": 0}}\n'
    (tmp_path / "rows.jsonl").write_text(row * 2)
    lines = 'format = "jsonl"\nfile = "rows.jsonl"\ntarget = "y"\nowner = "who"\n'
    (tmp_path / "data.toml").write_text(lines + "num_classes = 2\n[columns]\nx = [0, 1]\n")
    with pytest.raises(FolderError, match=r"who is a list or an object: it must name the owner"):
        load_folder(str(tmp_path))
