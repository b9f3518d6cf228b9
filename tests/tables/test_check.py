"""`discreet data check`: proposals that decide nothing in silence, counts of what can't be read,
and a table that is corrected step by step."""

from __future__ import annotations

import random
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from discreet.data.cell_reading import Marks
from discreet.data.description import read_description
from discreet.data.encoding import read_cells
from discreet.data.folder import load_folder
from discreet.data.targets import FolderError
from discreet.run_files.compose import load_asked, load_config
from discreet.server.resolve import resolve
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from discreet.tables.proposal import guessed_column
from discreet.tables.written_numbers import marks_in
from tests.command import data, predict
from tests.tables.made_tables import make_project

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("name", "cells", "said"),
    [
        ("seen", ["01/02/2022", "03/12/2022"], 'write format = "%d/%m/%Y" or "%m/%d/%Y"'),
        ("seen", ["01-02-2022", "03-12-2022"], 'write format = "%d-%m-%Y" or "%m-%d-%Y"'),
        ("dose", ["1,234", "5,678"], 'write decimal = "," or thousands = ","'),
        ("", ["0", "1", "2"], "it numbers the rows"),
        ("Unnamed: 0", ["1", "2", "3"], "it numbers the rows"),
        ("nr", [f"{row:03d}" for row in range(40)], "like an identifier"),
        ("dose", ["3,5", "4,5"] * 9, 'has decimal commas: write decimal = ","'),
        ("seen", ["13/02/2023", "02/13/2023", "05/06/2023"] * 9, "all in one order"),
        ("seen", ["13.02.23", "14.02.24"] * 9, 'write four, or format = "%d.%m.%y"'),
        ("seen", ["2023-05-01", "01.05.2023", "05/06/2023"] * 9, "dates in several formats, %"),
        ("seen", ["2023-05-01", "05/06/2023"] * 9, "dates in several formats, %"),
        ("seen", ["2023-05-01", "01.05.2023", "soon"] * 9, "the formats %Y-%m-%d, %d.%m.%Y: write"),
        ("weight", ["70 kg", "154 lb", "80 kg"] * 9, "has one of several units"),
        ("weight", ["70 kg", "80", "90"] * 9, "and others none"),
        ("dose", ["1\u00a0234,5", "2\u00a0345,5"] * 9, "write thousands for it"),
        ("crp", ["3", "4", ">500"] * 9, "write the limit alone"),
        ("base excess", ["2-", "3", "1-"] * 9, "a sign after a number: write it before"),
        ("share", ["45%", "0.38", "41%"] * 9, "and others none"),
        ("age", [f'="{at}"' for at in range(40)], 'has =" before and " after it, as Excel'),
        ("plz", ['="01234"', '="01235"'] * 9, 'has =" before and " after it, as Excel'),
        ("crp", ["1,5", "2.5", "#WERT!", "-", "1.250,5"] * 9, "other cells of the column a dec"),
        ("crp", [f"{at},5" for at in range(40)] + ["-", "#WERT!"], "has decimal commas: write"),
        ("crp", [f"{at},5" for at in range(40)] + ["ask", "gone"], 'empty = ["ask", "gone"]'),
    ],
)
def test_what_may_mean_two_things_is_left_out_with_the_choice(
    name: str, cells: list[str], said: str
) -> None:
    found = guessed_column(name, cells, Marks())
    assert found.line == ""
    assert said in found.why


@pytest.mark.parametrize(
    ("name", "cells", "line"),
    [
        ("seen", ["01/02/2022", "03/31/2022"], 'format = "%m/%d/%Y" }'),
        ("seen", ["01.02.2022", "2022-03-31"], 'format = ["%Y-%m-%d", "%d.%m.%Y"] }'),
        (
            "seen",
            ["2023-05-01", "01.05.2023", "05/31/2023"],
            'format = ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y"] }',
        ),
        ("plz", ["80331", "10115"] * 9, 'levels = ["10115", "80331"] }'),
        ("ward", ["01", "02", "10"] * 9, 'levels = ["01", "02", "10"] }'),
        ("zip", [f"8{row:04d}" for row in range(90)], '{ kind = "text", width = 16 }'),
        ("diagnosis", ["I21.4", "E11.9", "Z00"] * 9, 'fold = "icd10" }'),
        ("crp", ["5", "k.A.", "7"] * 9, 'missing = "middle", empty = ["k.A."] }'),
        ("crp", ["5", "<1", "7"] * 9, 'below = "half" }'),
        ("crp", ["5", "#WERT!", "7", "-"] * 9, 'empty = ["#WERT!", "-"] }'),
        ("crp", ["5 mg/l", "12 mg/l", "7"] * 9, 'unit = "mg/l" }'),
    ],
)
def test_what_hospitals_write_is_proposed_with_its_keys(
    name: str, cells: list[str], line: str
) -> None:
    assert guessed_column(name, cells, Marks()).line.endswith(line)


@pytest.mark.parametrize(
    "cells",
    [["1a", "2b"], ["18-25", "26-35"], ["1 child", "2 children", "none left"], ["1.2.3", "1.2.4"]],
)
def test_words_with_digits_stay_categories(cells: list[str]) -> None:
    assert guessed_column("group", cells * 9, Marks()).line.startswith("[")


def test_a_point_before_three_digits_beside_both_decimal_marks_is_left_out(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["a;b;c;y", *(f"{at % 4},5;{at % 4}.5;{at % 4 + 1}.234;{at % 2}" for at in range(30))]
    for _ in range(2):  # nor is it described once data.toml is there
        checked(tmp_path, rows, "--target", "y", "--write")
        text = (tmp_path / "data.toml").read_text()
        assert "# a is left out: line 2 of a.csv " in text
        assert "\nb = {" in text
        assert "# c is left out: line 2 of a.csv " in text


def test_numbers_as_word_processors_write_them_are_read_by_what_is_proposed(
    tmp_path: Path, capsys: Capture
) -> None:
    cells = ["1\u202f234,5", "\u22122\u202f000,25", "3,5"]
    rows = ["a;y", *(f"{cells[at % 3]};{at % 2}" for at in range(30))]
    assert checked(tmp_path, rows, "--target", "y", "--write") == 0
    path = tmp_path / "data.toml"
    path.write_text(re.sub("unconfirmed = .*", "", path.read_text()))
    assert checked(tmp_path, rows) == 0
    task = load_folder(str(tmp_path))
    (column,) = read_description(tmp_path).columns
    values = read_cells(column, cells, read_description(tmp_path).marks).values
    assert values.tolist() == [1234.5, -2000.25, 3.5]
    assert len(task.train) == 30


def test_a_code_that_looks_like_a_power_of_ten_is_commented() -> None:
    assert "if these are codes" in guessed_column("lot", ["1E10", "2E11"] * 9, Marks()).why


@pytest.mark.parametrize(
    ("cell", "keys", "said"),
    [
        (">500", ', below = "half"', "but above a limit"),
        ("154 lb", ', unit = "kg"', "its unit is not kg: convert it"),
        ("154 lb", "", "or write unit for"),
    ],
)
def test_a_cell_above_a_limit_or_with_another_unit_gets_its_own_remedy(
    cell: str, keys: str, said: str, tmp_path: Path, capsys: Capture
) -> None:
    toml = f'[columns]\nw = {{ kind = "number", low = 0, high = 9{keys} }}\n'
    rows = ["w,y", *(f"{at},{at % 2}" for at in range(9)), f"{cell},1"]
    assert checked(tmp_path, rows, toml=toml) == 2
    found = capsys.readouterr()
    assert said in found.out
    assert said in found.err
    assert "kind = category" not in found.out + found.err


@pytest.mark.parametrize(
    ("cells", "marks"),
    [
        (["1,5", "1.234"], Marks(",", ".")),
        (["1.234,5"], Marks(",", ".")),
        (["1.5", "1,234"], Marks(".", ",")),
        (["1,234"], Marks()),
        (["1.234"], Marks()),
        (["0,123"], Marks(",")),
        (["1\u00a0234,5"], Marks(",", "\u00a0")),
        (["1 234", "2.5"], Marks(".", " ")),
        (["1 234", "1\u202f234", "2.5"], Marks()),
        (["\u22121,5"], Marks(",")),
    ],
)
def test_marks_follow_from_all_cells_of_a_table(cells: list[str], marks: Marks) -> None:
    assert marks_in({"x": cells}).chosen() == marks


HEAD = 'format = "csv"\nfile = "a.csv"\ntarget = "y"\nclasses = ["0", "1"]\n'


def checked(folder: Path, rows: list[str], *words: str, toml: str = "") -> int:
    (folder / "a.csv").write_text("\n".join(rows) + "\n")
    if toml:
        (folder / "data.toml").write_text(HEAD + toml)
    return data(["check", str(folder / "a.csv"), *words])


def test_check_counts_what_it_can_not_read_by_column_and_shows_no_cell(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["age,sex,seen,y"]
    rows += [f"{('HIV', 40, 400)[at % 3]},{'FMX'[at % 3]},2022-0{at},{at % 2}" for at in range(9)]
    toml = '[columns]\nage = [0, 110]\nsex = ["F", "M"]\nseen = [2020-01-01, 2022-12-31]\n'
    assert checked(tmp_path, rows, toml=toml) == 2
    said = capsys.readouterr()
    assert "age: 3 cells can't be read. line 2: " in said.out
    assert "age: 3 cells are outside low..high" in said.out
    assert "sex: 3 cells are no level" in said.out
    assert "seen: 9 cells can't be read. line 2: " in said.out
    assert "HIV" not in said.out + said.err


def test_cells_below_a_limit_that_are_read_as_half_are_not_outside_of_the_range(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["crp,y", *(f"{('<4', 5, 9)[at % 3]},{at % 2}" for at in range(9))]
    toml = '[columns]\ncrp = { kind = "number", low = 4, high = 9, below = "half" }\n'
    assert checked(tmp_path, rows, toml=toml) == 0
    assert "outside" not in capsys.readouterr().out


def test_a_corrected_column_is_described_without_beginning_anew(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["age,dose,y", *(f"{20 + at},{at % 4},{at % 2}" for at in range(30))]
    wrong = [*rows[:4], "2o,3,1", *rows[4:]]
    assert checked(tmp_path, wrong, "--target", "y", "--write") == 0
    path = tmp_path / "data.toml"
    assert "# age is left out: line 5 of a.csv " in path.read_text()
    path.write_text(re.sub("dose = .*", "dose = [0, 9]  # by hand", path.read_text()))
    capsys.readouterr()
    assert checked(tmp_path, rows) == 2  # unconfirmed
    assert "age: can be described now. --write adds them" in capsys.readouterr().out
    assert checked(tmp_path, rows, "--write") == 2
    text = path.read_text()
    assert "\nage = { kind = " in text
    assert "dose = [0, 9]  # by hand" in text
    assert 'unconfirmed = ["dose", "y", "age"]' in text
    path.write_text(re.sub("unconfirmed = .*", "", text))
    assert checked(tmp_path, rows) == 0


def test_a_table_of_which_no_column_is_described_says_so_and_starts_no_run(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["age,y", *(f'="{20 + at}",{at % 2}' for at in range(30))]
    assert checked(tmp_path, rows, "--target", "y", "--write") == 0
    assert "\n# No column is described, so a run has no inputs" in capsys.readouterr().out
    path = tmp_path / "data.toml"
    path.write_text(re.sub("unconfirmed = .*", "", path.read_text()))
    with pytest.raises(FolderError, match=r"\[columns\] is empty: describe columns"):
        load_folder(str(tmp_path))
    corrected = [row.replace('="', "").replace('"', "") for row in rows]
    assert checked(tmp_path, corrected, "--write") == 2  # unconfirmed
    assert "No column" not in path.read_text()
    assert 'unconfirmed = ["age"]' in path.read_text()


def test_two_spellings_of_an_owner_are_asked_and_the_answer_is_written(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["pid,age,y", *(f"P{at // 2},{20 + at},{at % 2}" for at in range(30)), "p3,33,1"]
    asked = ["--owner", "pid", "--target", "y"]
    assert checked(tmp_path, rows, *asked) == 0
    assert "# line 8 and line 32: the owner is written in two ways" in capsys.readouterr().out
    assert checked(tmp_path, rows, *asked, "--ids", "folded", "--write") == 0
    path = tmp_path / "data.toml"
    path.write_text(re.sub("unconfirmed = .*", "", path.read_text()))
    assert checked(tmp_path, rows) == 0
    assert "15 owners (pid)" in capsys.readouterr().out


def constant(at: int) -> str:
    return "7"


def different(at: int) -> str:
    return f"P{at * 7 % 60}"


def outcome(at: int) -> str:
    return str(50 + at % 2 * 40 + at % 30)


def plain(at: int) -> str:
    return str(at * 7 % 30)


@pytest.mark.parametrize(
    ("cell", "column", "said"),
    [
        (constant, "[0, 9]", "x says the same in every row"),
        (different, '["P1"]', "x is different in every row, like an identifier"),
        (outcome, "[0, 200]", "x alone separates y, which is too good to be true"),
        (plain, "[0, 200]", ""),
    ],
)
def test_hints_name_columns_that_are_not_worth_an_input(
    cell: Callable[[int], str], column: str, said: str, tmp_path: Path, capsys: Capture
) -> None:
    rows = ["x,y", *(f"{cell(at)},{at % 2}" for at in range(60))]
    assert checked(tmp_path, rows, toml=f"[columns]\nx = {column}\n") == 0
    out = capsys.readouterr().out
    assert said in out
    assert ("x " in out) == bool(said)


def test_rows_that_are_copies_are_told_where_no_owner_is_named(
    tmp_path: Path, capsys: Capture
) -> None:
    numbers = random.Random(30477)

    def rows(most: int) -> list[str]:
        return [
            ",".join(str(numbers.randrange(most)) for _ in "xzw") + f",{at % 2}" for at in range(60)
        ]

    columns = "[columns]\n" + "".join(f"{name} = [0, 900]\n" for name in "xzw")
    once = rows(900)
    appended = [*once, *once[7:20]]
    assert checked(tmp_path, ["x,z,w,y", *appended], toml=columns) == 0
    said = capsys.readouterr().out
    assert "line 9 and line 62 are equal, and 13 rows in all repeat an earlier one" in said
    # few values in each column: people are equal by chance
    assert checked(tmp_path, ["x,z,w,y", *rows(4)], toml=columns) == 0
    assert "equal" not in capsys.readouterr().out
    owned = [f"{line},P{at % 60}" for at, line in enumerate(appended)]
    assert checked(tmp_path, ["x,z,w,y,who", *owned], toml=f'owner = "who"\n{columns}') == 0
    assert "equal" not in capsys.readouterr().out


def test_predict_reads_an_encoding_and_counts_what_the_model_reads_as_something_else(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = make_project(tmp_path, people=30)
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=30", "rounds=1"]
    simulate(*load_asked([*words, "seed=40127", f"output_dir={folder / 'run'}"]))
    table = folder / "new.csv"
    row = "Pä;14.02.2023;{};F;{};6,4;seen;no"
    rows = [row.format(40, "surgery"), row.format(400, "surgery"), row.format(40, "dentist")]
    head = (folder / "test.csv").read_text("utf-8-sig").splitlines()[0]
    table.write_bytes("\n".join([head, *rows]).encode("cp1252"))
    given = [str(folder / "run"), "--data", str(table), "--out", str(folder / "out.csv")]
    assert predict(given) == 2
    refused = capsys.readouterr().err
    assert "--encoding" in refused
    assert "next model" not in refused
    assert predict([*given, "--encoding", "cp1252"]) == 0
    said = capsys.readouterr().err
    assert "age: 1 cells are outside low..high" in said
    assert "ward: 1 cells are no level" in said


def test_a_target_that_writes_one_number_in_two_ways_has_no_more_classes_for_it(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["x,y", *(f"{at},{('0', '1', '0.0', '1.0')[at % 4]}" for at in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    assert data(["check", str(tmp_path / "t.csv"), "--target", "y"]) == 2
    assert "y writes one number in several ways" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (("ja", "nein"), ["nein", "ja"]),
        (("Y", "N"), ["N", "Y"]),
        (("positive", "negative"), ["negative", "positive"]),
        (("benign", "malign"), ["benign", "malign"]),
        (("died", "alive"), ["alive", "died"]),
        (("F", "M"), ["F", "M"]),
        (("+", "-"), ["-", "+"]),
    ],
)
def test_of_two_classes_the_word_that_means_yes_is_proposed_second_and_counted(
    words: tuple[str, str], proposed: list[str], tmp_path: Path, capsys: Capture
) -> None:
    rows = ["x,y", *(f"{at % 7},{words[at % 5 > 1]}" for at in range(40))]
    assert checked(tmp_path, rows, "--target", "y", "--write") == 0
    count = sum(row.endswith(f",{proposed[1]}") for row in rows)
    said = capsys.readouterr().out
    assert f"# {proposed[1]}, in {count} of 40 rows, is the second class" in said
    path = tmp_path / "data.toml"
    assert tomllib.loads(path.read_text())["classes"] == proposed
    path.write_text(re.sub("unconfirmed = .*", "", path.read_text()))
    assert checked(tmp_path, rows) == 0
    said = capsys.readouterr().out
    assert f"second class: y = {proposed[1]} in {count} of 40 rows" in said
    assert f"If {proposed[0]} is meant" in said


def test_rows_without_a_target_are_counted_before_and_after_data_toml_is_there(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["x,y", *(f"{at % 7},{('no', 'yes', '', 'NA', 'unknown')[at % 5]}" for at in range(40))]
    for more in ([], ["--write"]):
        assert checked(tmp_path, rows, "--target", "y", *more) == 0
        said = capsys.readouterr().out
        assert "# y is empty in 16 of 40 rows" in said
        assert "# does unknown, in 8 of 40 rows, say that nothing is known?" in said
    path = tmp_path / "data.toml"
    path.write_text(re.sub("unconfirmed = .*", "", path.read_text()))
    assert checked(tmp_path, rows) == 2
    assert "y is empty in 16 of 40 rows, first in line 4:" in capsys.readouterr().out


def test_a_class_that_the_test_set_lacks_is_told_before_the_first_run(
    tmp_path: Path, capsys: Capture
) -> None:
    rows = ["x,y", *(f"{at},{at % 2}" for at in range(30))]
    (tmp_path / "test.csv").write_text("\n".join(rows[:1] + rows[1::2]))
    toml = 'test = "test.csv"\n[columns]\nx = [0, 40]\n'
    assert checked(tmp_path, rows, toml=toml) == 0
    assert "test.csv has no row of class 1: nothing there can measure it" in capsys.readouterr().out
    (tmp_path / "test.csv").write_text("\n".join(rows))
    assert checked(tmp_path, rows) == 0
    assert "has no row of class" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("header", "is_told"),
    [("1,44,F,2.5", True), ("P1,44,F,no", True), ("pid,2019,2020,y", False), ("0,1,2,3", False)],
)
def test_a_first_row_that_looks_like_data_and_not_like_names_is_told(
    header: str, is_told: bool, tmp_path: Path, capsys: Capture
) -> None:
    rows = [header, *(f"{at},{at % 7},{at % 3},{at % 2}" for at in range(40))]
    assert checked(tmp_path, rows) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f'# the header "{header.replace(",", ", ")}" looks like') == is_told
    assert data(["split", str(tmp_path / "a.csv")]) == 0
    assert ("looks like data" in capsys.readouterr().out) == is_told


def test_check_of_a_table_without_a_test_set_names_a_command_that_is_not_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = make_project(tmp_path, people=30)
    path = folder / "data.toml"
    path.write_text(path.read_text().replace('test = "test.csv"\n', ""))
    assert data(["check", str(folder / "train.csv")]) == 0
    said = capsys.readouterr().out
    assert "There is no test set" in said
    assert "discreet data split" in said
    (start,) = (line for line in said.splitlines() if line.startswith("  discreet simulate "))
    words = shlex.split(start)[2:]
    resolve(load_config(words))
    words.remove("evaluation.kind=none")
    with pytest.raises(ConfigError, match=r"kind=public needs .* data split.*kind=private.*none"):
        resolve(load_config(words))
    with pytest.raises(
        ConfigError, match=r"predictions=true needs .* operations\.predictions=false"
    ):
        resolve(load_config([*words, "evaluation.kind=none", "operations.predictions=true"]))
