"""One person is one key, and spellings that may be one person's are a question."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from discreet import DPSGD, LoopPrivacy
from discreet.data.csv_table import CsvTable
from discreet.data.description import read_description
from discreet.data.folder import load_folder, read_file
from discreet.data.targets import FolderError
from discreet.guard.patient_blocks import split_site
from discreet.privacy.person import EXACT, FOLDED, OtherSpelling, person_keys
from discreet.settings.rules import ConfigError
from discreet.tables.owner_split import split_by_owner

PAIRS = [("P7", "p7"), ("007", "7"), ("7.0", "7"), ("Ångström", "ångström"), ("0", "000")]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_spellings_that_may_be_one_person_are_refused_or_decided(one: str, other: str) -> None:
    with pytest.raises(OtherSpelling, match="almost as in row 1"):
        person_keys([one, "B", other])
    assert len({*person_keys([one, other], EXACT)}) == 2
    assert len({*person_keys([one, other], FOLDED)}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("Ann Lee", " Ann\u00a0 Lee "), ("Å", "A\u030a"), ("\uff17", "7"), (12.0, 12)],
)
def test_the_same_text_in_another_form_is_one_person(one: object, other: object) -> None:
    assert len({*person_keys([one, other])}) == 1


TOML = 'format = "csv"\nfile = "train.csv"\ntarget = "y"\nowner = "pid"\nclasses = ["no", "yes"]\n'
COLUMNS = "[columns]\nage = [0, 110]\n"


def folder(path: Path, owners: list[str], *, tested: tuple[str, ...] = (), more: str = "") -> str:
    path.mkdir()
    for name, whose in (("train", owners), ("test", tested)):
        rows = [f"{who},{40 + at},{('no', 'yes')[at % 2]}" for at, who in enumerate(whose)]
        (path / f"{name}.csv").write_text("\n".join(["pid,age,y", *rows]) + "\n")
    test = 'test = "test.csv"\n' if tested else ""
    (path / "data.toml").write_text(TOML + test + more + COLUMNS)
    return str(path)


def test_a_table_asks_and_its_description_decides(tmp_path: Path) -> None:
    owners = ["A1", "B2", "a1", "B2"]
    with pytest.raises(FolderError, match=r"line 4: pid: the owner is written almost as in row 1"):
        load_folder(folder(tmp_path / "asks", owners))
    counts = []
    for ids in IDS:
        task = load_folder(folder(tmp_path / ids, owners, more=f'ids = "{ids}"\n'))
        assert task.owners is not None
        counts.append(len(task.owners.unique()))
    assert counts == [3, 2]


IDS = (EXACT, FOLDED)


@pytest.mark.parametrize("tested", ["12.0", "012", "12", "P9 ", "p9"])
def test_a_person_in_both_tables_is_found_under_any_spelling(tested: str, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="has rows in"):
        load_folder(folder(tmp_path / "both", ["12", "P9", "B"], tested=(tested, "C")))


def test_ids_of_twenty_digits_are_not_rounded_to_one(tmp_path: Path) -> None:
    path = tmp_path / "digits"
    folder(path, [f"1234567890123456789{at % 10}" for at in range(8)])
    (path / "data.toml").write_text(TOML + 'low = 0\nhigh = 110\ninputs = ["age"]\n')
    with pytest.raises(FolderError, match="too many digits"):
        load_folder(str(path))


def test_predictions_take_ids_that_are_written_in_two_ways(tmp_path: Path) -> None:
    path = Path(folder(tmp_path / "ids", ["A1", "B", "a1", "C"], more='ids = "exact"\n'))
    shape = load_folder(str(path)).shape
    description = read_description(path).model_copy(update={"ids": None})
    _, _, ids = read_file(path / "train.csv", description, shape, id_column="pid")
    assert ids is not None
    assert ids.tolist() == ["A1", "B", "a1", "C"]


def test_a_split_asks_too(tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    table.write_text("pid,age\n" + "".join(f"{who},3\n" for who in ("A1", "B", "C", "a1", "D")))
    with pytest.raises(FolderError, match="line 5"):
        split_by_owner(CsvTable(table), owner="pid", share=0.5)
    parts = split_by_owner(CsvTable(table), owner="pid", share=0.5, ids=FOLDED)
    assert sum(part.owners for part in parts) == 4


def test_a_sites_split_asks_too(tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    table.write_text("pid,age\nA1,3\na1,4\nB,5\n")
    with pytest.raises(ConfigError, match="row 2: a patient's id is written almost as another"):
        split_site(table, tmp_path / "site", id_column="pid", count=2)
    assert not (tmp_path / "site").exists()


def loop(owners: object) -> DPSGD:
    rows = torch.arange(24.0).view(8, 3)
    model = nn.Linear(3, 2)
    return DPSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(rows, torch.arange(8) % 2),
        batch_size=2,
        steps=2,
        delta=1e-2,
        owners=owners,
        privacy=LoopPrivacy(noise_multiplier=1.0),
    )


def test_a_loop_over_owners_takes_no_mixed_kinds_and_no_second_spelling() -> None:
    with pytest.raises(ValueError, match="all texts or all numbers"):
        loop(["7", 7, "a", "b", "c", "d", "e", "f"])
    with pytest.raises(ValueError, match="row 1 an owner is written almost as another"):
        loop(["A1", "a1", "b", "b", "c", "c", "d", "d"])
    spaced = loop(["A1", "A1 ", "b", "b", "c", "c", "d", "d"])
    assert spaced.sampling_probability == 2 / 4
    assert loop(np.arange(8) // 2).sampling_probability == 2 / 4
