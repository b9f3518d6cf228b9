"""One person is one key, and spellings that may be one person's are a question."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

from discreet import DPSGD, LoopPrivacy
from discreet.cli.main import main
from discreet.data.csv_table import CsvTable
from discreet.data.description import read_description
from discreet.data.folder import load_folder, read_file
from discreet.data.targets import FolderError
from discreet.guard.patient_blocks import block_of, split_site
from discreet.guard.site_blocks import read_split
from discreet.privacy.person import EXACT, FOLDED, OtherSpelling, person_keys
from discreet.settings.rules import ConfigError
from discreet.tables.owner_split import is_tested, split_by_owner

PAIRS = [
    *(("P7", "p7"), ("007", "7"), ("7.0", "7"), ("Ångström", "ångström"), ("0", "000")),
    *(("P007", "P7"), ("A-01", "a-1"), ("12,0", "12"), ("P2", "P\u00b2"), ("\uff17", "7")),
    *(
        ("a", "a\u200b"),
        ("a", "\ufeffa"),
        ("Ann", "A\u00adnn"),
        ("p-1", "p\u20111"),
        ("p-1", "p\u20131"),
    ),
    *(("p-1", f"p{dash}1") for dash in "\u2212\u02d7\u2043"),
    *(("p1", f"p{hidden}1") for hidden in "\u034f\u180b\u2800\u3164\ufe0f\0\x7f\x80"),
    *(("O'Brien", f"O{quote}Brien") for quote in "\u2019\u02bc"),
    ("p12", "p\u0661\u0662"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_spellings_that_may_be_one_person_are_refused_or_decided(one: str, other: str) -> None:
    with pytest.raises(OtherSpelling, match="written in two ways") as error:
        person_keys([one, "B", other])
    assert (error.value.row, error.value.before) == (2, 0)
    assert len({*person_keys([one, other], EXACT)}) == 2
    assert len({*person_keys([one, other], FOLDED)}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("Ann Lee", " Ann\u00a0 Lee "), ("Å", "A\u030a"), (12.0, 12)],
)
def test_the_same_text_in_another_form_is_one_person(one: object, other: object) -> None:
    assert len({*person_keys([one, other])}) == 1


@pytest.mark.parametrize("other", ["P\u00b2", "P2 ", "p2", "P\u00a02"])
def test_exact_ids_are_exact(other: str) -> None:
    assert person_keys(["P2", other], EXACT) == ["P2", other]


@pytest.mark.parametrize(("one", "other"), [("1.05", "1.5"), ("70", "7"), ("A10", "A1")])
def test_zeros_that_count_make_two_people(one: str, other: str) -> None:
    assert len({*person_keys([one, other])}) == 2


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
    with pytest.raises(FolderError, match=r"line 4 and line 2: pid: "):
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


PLAIN = TOML + 'low = 0\nhigh = 110\ninputs = ["age"]\n'


def people(path: Path, owners: list[str], more: str = "", tested: tuple[str, ...] = ()) -> int:
    """The number of people in a table that no [columns] describe."""
    folder(path, owners, tested=tested)
    test = 'test = "test.csv"\n' if tested else ""
    (path / "data.toml").write_text(more + test + PLAIN)
    task = load_folder(str(path))
    assert task.owners is not None
    return len(task.owners.unique())


def test_without_columns_an_owner_is_text_too(tmp_path: Path) -> None:
    digits = [f"1234567890123456789{at % 10}" for at in range(8)]
    assert people(tmp_path / "digits", digits) == 8
    with pytest.raises(FolderError, match="line 3 and line 2: pid: "):
        people(tmp_path / "zeros", ["007", "7", "8"])
    assert people(tmp_path / "exact", ["007", "7", "8"], 'ids = "exact"\n') == 3
    assert people(tmp_path / "folded", ["007", "7", "8"], 'ids = "folded"\n') == 2


def test_exact_ids_are_exact_in_the_public_test_set_too(tmp_path: Path) -> None:
    assert people(tmp_path / "two", ["A1", "B"], 'ids = "exact"\n', ("a1", "C")) == 2
    with pytest.raises(FolderError, match="has rows in"):
        people(tmp_path / "one", ["A1", "B"], 'ids = "exact"\n', ("A1", "C"))


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
    asked = "line 5 and line 2.*one person write --ids folded, if they are two --ids exact"
    with pytest.raises(FolderError, match=asked):
        split_by_owner(CsvTable(table), owner="pid", share=0.5)
    parts = split_by_owner(CsvTable(table), owner="pid", share=0.5, ids=FOLDED)
    assert sum(part.owners for part in parts) == 4


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_person_is_in_one_part_and_one_block_under_any_spelling(one: str, other: str) -> None:
    for share in (0.2, 0.5, 0.8):
        assert is_tested(one, share) == is_tested(other, share)
    blocks = {block_of(name, key=b"k" * 32, count=10**9) for name in (one, other)}
    assert len(blocks) == 1


def split_of(path: Path, more: str, *words: str) -> int:
    """The number of patients that `discreet site split` counts in a table with A1, a1 and B."""
    folder(path, ["A1", "a1", "B", "B"], more=more)
    out = path.with_name(f"{path.name}-site")
    given = ["--id", "pid", "--blocks", "2", "--out", str(out), *words]
    assert main(["site", "split", str(path), *given]) == 0
    return read_split(out).patients


def test_a_sites_split_asks_and_follows_ids_of_the_command_and_of_data_toml(
    tmp_path: Path,
) -> None:
    table = tmp_path / "all.csv"
    table.write_text('pid,age\nA1,"3\n3"\na1,4\nB,5\n')
    with pytest.raises(ConfigError, match=r"line 4 and .*line 3: .* write --ids folded"):
        split_site(table, tmp_path / "site", id_column="pid", count=2)
    assert not (tmp_path / "site").exists()
    assert split_of(tmp_path / "a", 'ids = "folded"\n') == 2
    assert split_of(tmp_path / "b", 'ids = "folded"\n', "--ids", "exact") == 3
    assert split_of(tmp_path / "c", "", "--ids", "folded") == 2


def test_names_of_patients_folders_are_asked_too(tmp_path: Path) -> None:
    for name in ("P007", "P7", "B"):
        (tmp_path / "data" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"P7 and .*P007: "):
        split_site(tmp_path / "data", tmp_path / "site", id_column="folders", count=2)
    split = split_site(
        tmp_path / "data", tmp_path / "site", id_column="folders", count=2, ids=FOLDED
    )
    assert split.patients == 2


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
    for mixed in (["7", 7], [1, True], [2**53, 2**53 + 1, 0.5], [7, 7.0]):
        with pytest.raises(ValueError, match="all texts or all"):
            loop([*mixed, *[mixed[0]] * (8 - len(mixed))])
    with pytest.raises(ValueError, match="float has no room"):
        loop([2.0**53] * 8)
    with pytest.raises(ValueError, match="owners must be texts"):
        loop([(1, 2)] * 8)
    with pytest.raises(ValueError, match="rows 0 and 1 "):
        loop(["A1", "a1", "b", "b", "c", "c", "d", "d"])
    spaced = loop(["A1", "A1 ", "b", "b", "c", "c", "d", "d"])
    assert spaced.sampling_probability == 2 / 4
    assert loop(np.arange(8) // 2).sampling_probability == 2 / 4


def test_an_example_at_two_indices_of_one_owner_is_found_by_the_owners_key() -> None:
    rows = TensorDataset(torch.arange(12.0).view(4, 3), torch.arange(4) % 2)
    twice = ConcatDataset([rows, rows])
    owners = ["A", "B", "C", "D"]
    model = nn.Linear(3, 2)
    made = DPSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        twice,
        batch_size=2,
        steps=2,
        delta=1e-2,
        owners=[*owners, *(f"{name} " for name in owners)],
        privacy=LoopPrivacy(noise_multiplier=1.0),
    )
    assert made.sampling_probability == 2 / 4
