"""Patients in blocks: each in one, by its id alone, and nothing of one block in another."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from discreet.cli.main import main
from discreet.data.targets import FolderError
from discreet.guard.block_app import unpack
from discreet.guard.patient_blocks import block_of, split_site, without_comments
from discreet.guard.site_blocks import KEY, read_blocks
from discreet.settings.rules import ConfigError

BLOCKS = 4
PATIENTS = [f"p{number}" for number in range(20)]
NEW = "a name that is longer than all others"


def content(archive: Path) -> dict[str, bytes]:
    """The files of a block."""
    with tarfile.open(archive) as files:
        return {each.name: files.extractfile(each).read() for each in files if each.isfile()}  # type: ignore[union-attr]


def split(data: Path, folder: Path, *, id_column: str = "patient") -> list[dict[str, bytes]]:
    """The files of each block."""
    split_site(data, folder, id_column=id_column, count=BLOCKS)
    return [content(path) for path in read_blocks(folder, id_column=id_column, count=BLOCKS)]


def csv_of(folder: Path, patients: list[str]) -> Path:
    path = folder / "rows.csv"
    path.write_text("patient,value\n" + "".join(f"{name},{len(name)}\n" for name in patients))
    return path


def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda count: bytes(range(count)))


def test_all_rows_of_a_patient_are_in_the_block_of_its_id(tmp_path: Path) -> None:
    blocks = split(csv_of(tmp_path, PATIENTS * 3), tmp_path / "site")
    key, found = (tmp_path / "site" / KEY).read_bytes(), []
    for number, files in enumerate(blocks):
        header, *rows = files["rows.csv"].decode().splitlines()
        names = [row.split(",")[0] for row in rows]
        assert header == "patient,value"
        assert {block_of(name, key=key, count=BLOCKS) for name in names} <= {number}
        found += names
    assert sorted(found) == sorted(PATIENTS * 3)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "npz"])
def test_one_patient_more_changes_one_block_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_key(monkeypatch)
    made = []
    for number, patients in enumerate((PATIENTS, [*PATIENTS, NEW])):
        folder = tmp_path / str(number)
        folder.mkdir()
        split_site(
            written(folder, patients, kind),
            folder / "site",
            id_column="patient",
            count=BLOCKS,
        )
        archives = read_blocks(folder / "site", id_column="patient", count=BLOCKS)
        made.append([path.read_bytes() for path in archives])
    changed = [
        number for number, (one, other) in enumerate(zip(*made, strict=True)) if one != other
    ]
    assert changed == [block_of(NEW, key=bytes(range(32)), count=BLOCKS)]


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_a_file_whose_types_follow_from_all_rows_is_refused_unless_they_are_public(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["site", "split", str(written(tmp_path, PATIENTS, kind)), "--id", "patient"]
    words += ["--blocks", str(BLOCKS), "--out", str(tmp_path / "site")]
    assert main(words) == 2
    assert "which one patient can change" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()
    assert main([*words, "--public-types"]) == 0


def test_no_comment_of_a_description_reaches_a_block(tmp_path: Path) -> None:
    text = (
        '# x is left out: line 62 of "t.csv" is above\nformat = "csv"\nfile = "t.csv"\n'
        'target = "y" # it\'s "his"\nowner = \'p#1\'\nclasses = ["a # b", "c\\"d"]\n'
        "[columns]\nage = [0, 100]  # of patient 7\n"
    )
    (tmp_path / "data.toml").write_text(text)
    bare = without_comments(tmp_path / "data.toml")
    assert tomllib.loads(bare.decode()) == tomllib.loads(text)
    assert not any(word in bare for word in (b"left out", b"his", b"patient 7"))
    (tmp_path / "data.toml").write_text('target = """\n# a text\n"""\n')
    with pytest.raises(FolderError, match="remove its comments"):
        without_comments(tmp_path / "data.toml")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "npz"])
def test_a_block_that_no_patient_falls_into_is_an_empty_table(kind: str, tmp_path: Path) -> None:
    made = split(written(tmp_path, PATIENTS[:1], kind), tmp_path / "site")
    sizes = [len(rows_of(files[f"rows.{kind}"], kind)) for files in made]
    assert sorted(sizes) == [0, 0, 0, 1]


def rows_of(content: bytes, kind: str) -> Sequence[object]:
    """The patients in a block's table."""
    if kind == "parquet":
        return parquet.read_table(io.BytesIO(content))["patient"].to_pylist()
    if kind == "npz":
        return np.load(io.BytesIO(content))["patient"].tolist()
    lines = content.decode().splitlines()
    return lines[1:] if kind == "csv" else lines


def written(folder: Path, patients: list[str], kind: str) -> Path:
    """A table of patients in a format, with a column whose categories name them all."""
    path = folder / f"rows.{kind}"
    values = list(range(len(patients)))
    if kind == "csv":
        path.write_text("patient,kind\n" + "".join(f"{name},{name}\n" for name in patients))
    elif kind == "jsonl":
        path.write_text(
            "".join(json.dumps({"patient": name, "kind": name}) + "\n" for name in patients)
        )
    elif kind == "parquet":
        columns = {"patient": pa.array(patients), "kind": pa.array(patients).dictionary_encode()}
        made = pa.table(columns).replace_schema_metadata({"rows": str(len(patients))})
        parquet.write_table(made, path)
    else:
        np.savez(path, patient=np.array(patients), value=np.array(values))
    return path


def test_a_folder_of_patients_goes_to_blocks_by_its_name(tmp_path: Path) -> None:
    for name in PATIENTS:
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "scan.txt").write_text(name)
    blocks = split(tmp_path / "data", tmp_path / "site", id_column="folders")
    assert sorted(name for files in blocks for name in files) == sorted(
        f"{name}/scan.txt" for name in PATIENTS
    )


def test_a_described_folder_keeps_its_description_in_every_block(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    csv_of(data, PATIENTS)
    (data / "data.toml").write_text(
        'format = "csv"\nfile = "rows.csv"\ntarget = "value"\nnum_classes = 4\n'
    )
    for files in split(data, tmp_path / "site"):
        assert files.keys() == {"data.toml", "rows.csv"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("patient,value\n,1\n", "line 2: the id in patient must be"),
        ("patient,value\na,1\nn/a,2\n", "line 3: the id in patient must be"),
        ("other,value\na,1\n", "no column patient; there are other, value"),
        ("patient,value\na\n", "line 2: 1 columns, but the header has 2"),
        ("patient,patient\na,b\n", "the column 'patient' occurs twice"),
    ],
)
def test_a_table_whose_patients_are_not_known_is_refused(
    text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ConfigError, match=said):
        split_site(tmp_path / "rows.csv", tmp_path / "site", id_column="patient", count=BLOCKS)
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("cell", ['{"a": 1, "b": 2}', "{}", "[1]", "[]", "true", "1.5"])
def test_an_id_that_is_no_text_and_no_whole_number_is_refused(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"patient": "a", "x": 1}}\n{{"patient": {cell}, "x": 2}}\n')
    with pytest.raises(ConfigError, match="row 2: the id in patient must be a text or a whole"):
        split_site(path, tmp_path / "site", id_column="patient", count=BLOCKS)
    assert not (tmp_path / "site").exists()


def test_an_empty_id_is_as_one_that_is_not_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--id", "", "--blocks", "3", "--out", str(tmp_path / "site")]
    assert main(["site", "split", str(csv_of(tmp_path, PATIENTS)), *words]) == 2
    assert "--id and --blocks must be given" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_a_table_has_no_folders_of_patients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows\.csv is not a folder"):
        split(csv_of(tmp_path, PATIENTS), tmp_path / "site", id_column="folders")


def test_a_table_as_a_spreadsheet_writes_it_is_split_with_its_separator(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("\ufeffpatient;Größe\na;1,5\nb;2\n".encode())
    split_site(tmp_path / "rows.csv", tmp_path / "site", id_column="patient", count=1)
    with tarfile.open(tmp_path / "site" / "blocks" / "00000.tar") as block:
        file = block.extractfile("rows.csv")
        assert file is not None
        assert file.read().decode() == "patient;Größe\na;1,5\nb;2\n"


def test_a_table_without_patients_and_one_that_is_not_there_are_not_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--id", "patient", "--blocks", str(BLOCKS), "--out", str(tmp_path / "site")]
    assert main(["site", "split", str(csv_of(tmp_path, [])), *words]) == 2
    assert "rows.csv has no patients" in capsys.readouterr().err
    assert main(["site", "split", str(tmp_path / "none.csv"), *words]) == 2
    assert "none.csv does not exist" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_a_table_in_another_encoding_is_told_and_not_split(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("patient,value\nMüller,1\n".encode("cp1252"))
    with pytest.raises(ConfigError, match=r"rows\.csv can't be read .*utf-8"):
        split_site(tmp_path / "rows.csv", tmp_path / "site", id_column="patient", count=BLOCKS)


def test_a_table_in_a_given_encoding_becomes_blocks_in_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("patient,value\nMüller,1\n".encode("cp1252"))
    words = ["--id", "patient", "--blocks", "2", "--out", str(tmp_path / "site")]
    assert main(["site", "split", str(path), *words]) == 2
    assert "`discreet site split`" in capsys.readouterr().err
    assert main(["site", "split", str(path), *words, "--encoding", "cp1252"]) == 0
    archives = [path.read_bytes() for path in (tmp_path / "site" / "blocks").iterdir()]
    assert any("patient,value\nMüller,1\n".encode() in archive for archive in archives)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.toml").write_text(
        'format = "csv"\nfile = "rows.csv"\ntarget = "value"\nnum_classes = 4\n'
    )
    words[-1] = str(tmp_path / "other")
    assert main(["site", "split", str(tmp_path / "data"), *words, "--encoding", "cp1252"]) == 2
    assert "--encoding goes with a CSV file" in capsys.readouterr().err


def test_what_would_be_in_every_block_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", patient=np.array(["a", "b"]), mean=np.zeros(3))
    with pytest.raises(ConfigError, match="every part would contain all"):
        split_site(
            tmp_path / "rows.npz",
            tmp_path / "site",
            id_column="patient",
            count=BLOCKS,
        )
    (tmp_path / "data").mkdir()
    csv_of(tmp_path / "data", PATIENTS)
    lines = (
        'format = "csv"\nfile = "rows.csv"\ntarget = "value"\nnum_classes = 4\ntest = "rows.csv"\n'
    )
    (tmp_path / "data" / "data.toml").write_text(lines)
    with pytest.raises(ConfigError, match="names a test set"):
        split_site(tmp_path / "data", tmp_path / "site", id_column="patient", count=BLOCKS)


def test_a_site_is_split_once(tmp_path: Path) -> None:
    split(csv_of(tmp_path, PATIENTS), tmp_path / "site")
    with pytest.raises(ConfigError, match="split once"):
        split(tmp_path / "rows.csv", tmp_path / "site")
    with pytest.raises(ConfigError, match="was split by id 'patient' into 4 blocks"):
        read_blocks(tmp_path / "site", id_column="patient", count=5)


def test_a_split_that_others_can_read_is_refused(tmp_path: Path) -> None:
    split(csv_of(tmp_path, PATIENTS), tmp_path / "site")
    os.chmod(tmp_path / "site" / KEY, 0o644)
    with pytest.raises(ConfigError, match="closed to all others"):
        read_blocks(tmp_path / "site", id_column="patient", count=BLOCKS)


@pytest.mark.parametrize("has_filters", [True, False])
def test_a_block_is_unpacked_with_and_without_filters_of_tarfile(
    has_filters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_site(csv_of(tmp_path, PATIENTS), tmp_path / "site", id_column="patient", count=BLOCKS)
    block, *_ = read_blocks(tmp_path / "site", id_column="patient", count=BLOCKS)
    if not has_filters:  # as Python 3.11.2 has none
        extract = tarfile.TarFile.extractall
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.setattr(tarfile.TarFile, "extractall", lambda files, at: extract(files, at))
    (tmp_path / "block").mkdir()
    unpack(block.read_bytes(), tmp_path / "block")
    assert {each.name: each.read_bytes() for each in (tmp_path / "block").iterdir()} == content(
        block
    )
