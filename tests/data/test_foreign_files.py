"""Files that others have made are read, or refused in one line with file and place."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from discreet.data.csv_table import MOST_COLUMNS, CsvTable
from discreet.data.folder import load_folder
from discreet.data.targets import FolderError
from discreet.run_files.compose import load_asked
from discreet.simulation.in_process import simulate
from tests import foreign_files
from tests.command import data
from tests.foreign_files import (
    CSV,
    Door,
    damaged,
    doors,
    doors_of_run,
    encrypted,
    npz,
    outcome_of,
    toml_of,
)
from tests.foreign_files import npz_with_header as headed

DOORS = doors()


@pytest.mark.parametrize("name", DOORS)
def test_each_door_takes_its_valid_file(name: str, tmp_path: Path) -> None:
    outcome = outcome_of(DOORS[name], tmp_path)
    assert (outcome.accepted, outcome.fault) == (True, "")


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[200] ^= 0xFF
    return bytes(changed)


DEEP = 100_000
NPZ = [
    (headed("{'descr': '<f8', 'fortran_order': False, 'shape': ("), "t.npz can't be read"),
    (
        headed("{'descr': '<f8', 'fortran_order': False, 'shape': (10**12,), }"),
        "t.npz can't be read",
    ),
    (
        headed("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"),
        "t.npz can't be read: it needs more memory than there is",
    ),
    (headed("{'descr': '<f8', 'fortran_order': False, 'shape': (), }"), "t.npz can't be read"),
    (headed("", version=9), "t.npz can't be read"),
    (encrypted(npz()), ".npy' is encrypted"),
    (flipped(npz()), "t.npz can't be read"),
]
JSONL = [
    ('{"patient": "\u00e4", "y": 0}\n'.encode("latin-1"), "t.jsonl can't be read"),
    (b'{"y": ' + b"[" * DEEP + b"]" * DEEP + b"}\n", "t.jsonl can't be read: it is nested too"),
    (b'{"y": ' * DEEP + b"1" + b"}" * DEEP + b"\n", "t.jsonl can't be read: it is nested too"),
]
TOML = [
    (toml_of("csv", '[columns]\nage = { kind = "category", levels = 5 }\n'), "age: levels must be"),
    (toml_of("csv", '[columns]\nage = { kind = "text", width = "a" }\n'), "age: width must be"),
    (toml_of("csv", "pairs = 5\n"), "pairs: write"),
    (toml_of("csv", 'encoding = "a\\u0000"\n'), "t.csv can't be read"),
    (toml_of("csv", 'separator = "\\n"\n'), "separator must be one sign"),
    (toml_of("csv").replace('"csv"', "5"), "format: "),
    (toml_of("csv").replace('"t.csv"', '"\\u0000"'), "must be directly in"),
    (toml_of("csv", f"low = {'9' * 9999}\n"), "data.toml is not TOML"),
    (toml_of("csv", f"low = {'[' * DEEP}"), "data.toml is not TOML: it is nested too deeply"),
]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *(("npz", *case) for case in NPZ),
        *(("jsonl", *case) for case in JSONL),
        *(("site split jsonl", *case) for case in JSONL[:1]),
        *(("data.toml plain", text.encode(), said) for text, said in TOML),
    ],
)
def test_a_hostile_file_is_refused_in_one_line_that_names_it(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door = DOORS[name]
    for place, (file, valid) in enumerate(door.files.items()):
        (tmp_path / file).write_bytes(valid if place else content)
    assert door.enter(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line
    assert said in line


@pytest.mark.parametrize("cell", ["1e308", "-1e39"])
def test_a_number_that_a_model_can_not_hold_is_refused_by_its_line(
    cell: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_text(f"patient,x,y\nA,1,0\nB,{cell},1\n")
    (tmp_path / "data.toml").write_text(toml_of("csv"))
    with pytest.raises(FolderError, match="line 3: an input is too large"):
        load_folder(str(tmp_path))


def test_a_folder_in_place_of_data_toml_is_told(tmp_path: Path) -> None:
    (tmp_path / "data.toml").mkdir()
    with pytest.raises(FolderError, match=r"data\.toml can't be read: Is a directory"):
        load_folder(str(tmp_path))


def test_twenty_thousand_columns_take_seconds_and_a_million_are_refused(tmp_path: Path) -> None:
    names = [f"x{place}" for place in range(20_000)]
    rows = [",".join(["A", *"1" * 20_000, str(row % 2)]) for row in range(4)]
    (tmp_path / "t.csv").write_text("\n".join([",".join(["patient", *names, "y"]), *rows]))
    (tmp_path / "data.toml").write_text(toml_of("csv"))
    start = time.process_time()
    assert load_folder(str(tmp_path)).shape.input_shape == (20_000,)
    assert time.process_time() - start < 20  # 1 s; the square of the columns took 11
    (tmp_path / "wide.csv").write_text(",".join(f"x{place}" for place in range(1_000_000)))
    with pytest.raises(FolderError, match=f"has more than {MOST_COLUMNS} columns"):
        CsvTable(tmp_path / "wide.csv").header()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without the log of what was clamped or left out."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def faults(found: dict[str, Door], seeds: range, folder: Path) -> list[str]:
    """What a user should never see, over files that these seeds damage, a door after the other."""
    names = list(found)
    listed = []
    for seed in seeds:
        name = names[seed % len(names)]
        door = found[name]
        content = damaged(next(iter(door.files.values())), random.Random(seed))
        place = folder / str(seed)
        place.mkdir()
        if fault := outcome_of(door, place, content).fault:
            listed.append(f"{name}, seed {seed}: {fault[:300]}")
    return listed


def test_damaged_files_are_read_or_refused(quiet: None, tmp_path: Path) -> None:
    assert faults(DOORS, range(210), tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_damaged_files_are_read_or_refused(
    part: int, quiet: None, tmp_path: Path
) -> None:
    begin = 1000 + 500 * part
    assert faults(DOORS, range(begin, begin + 500), tmp_path) == []


@pytest.mark.slow
def test_damaged_files_of_a_run_are_read_or_refused(quiet: None, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, content in DOORS["csv described"].files.items():
        (tmp_path / "data" / name).write_bytes(content)
    (tmp_path / "data" / "test.csv").write_text(CSV.replace("P", "Q"))
    described = (tmp_path / "data" / "data.toml").read_text()
    (tmp_path / "data" / "data.toml").write_text(f'test = "test.csv"\n{described}')
    words = [
        "experiment=table",
        f"data.path={tmp_path / 'data'}",
        "data.num_clients=12",
        "rounds=1",
    ]
    simulate(*load_asked([*words, "seed=5", f"output_dir={tmp_path / 'run'}"]))
    found = doors_of_run(tmp_path / "run")
    for place, name in enumerate(found):
        (tmp_path / f"valid{place}").mkdir()
        outcome = outcome_of(found[name], tmp_path / f"valid{place}")
        assert (name, outcome.accepted, outcome.fault) == (name, True, "")
    assert faults(found, range(121), tmp_path) == []


def test_the_search_finds_a_reader_that_lets_errors_through(quiet: None, tmp_path: Path) -> None:
    def let_through(*_: object) -> nullcontext[None]:
        return nullcontext()

    with patch("discreet.data.table_files.one_line", let_through):
        listed = faults(DOORS, range(105), tmp_path)
    assert {each.partition(",")[0] for each in listed} >= {"npz", "site split parquet"}


def test_the_search_finds_a_reader_that_never_ends(
    quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forever(*_: object) -> None:
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(foreign_files, "SECONDS", 1)
    monkeypatch.setattr("discreet.data.table_files._arrays_in", forever)
    assert "longer than 1 s" in outcome_of(DOORS["npz"], tmp_path).fault


def test_a_file_that_says_more_than_a_line_is_a_fault(tmp_path: Path) -> None:
    def raises(folder: Path) -> object:
        raise FolderError("one\ntwo")

    door = Door({"a": b""}, raises)
    assert "FolderError" in outcome_of(door, tmp_path).fault
    assert data(["check", str(tmp_path / "none.csv")]) == 2
