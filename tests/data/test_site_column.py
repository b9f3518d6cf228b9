"""A column that says at which site each row is: each of its values is a client of a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet import ConfigError, simulate
from discreet.data.datasets import load_task
from discreet.data.partition import client_examples_of
from discreet.run_files.compose import load_config
from discreet.run_files.run_folder import RunFolder
from tests.tables.made_tables import write_hospital

ROWS = [
    ("north", "a", 40, "no"),
    ("south", "b", 80, "yes"),
    ("north", "a", 41, "yes"),
    ("east", "c", 30, "no"),
    ("south", "d", 70, "no"),
]
SITES = "data.partition=site data.site=hospital data.num_clients=3"


def table(folder: Path, rows: list[tuple[str, str, int, str]] = ROWS) -> Path:
    tables = {}
    for name, first in (("train", ""), ("test", "t")):
        cells = [f"{where},{first}{who},{age},{said}" for where, who, age, said in rows]
        tables[name] = ["hospital,pid,age,returned", *cells]
    return write_hospital(folder, "age = [0, 110]\n", tables)


def test_each_value_is_a_client_in_sorted_order(tmp_path: Path) -> None:
    words = ["data.name=folder", f"data.path={table(tmp_path / 'data')}", *SITES.split()]
    data = load_config(words).data
    examples = client_examples_of(load_task(data.name, path=data.path), data)
    assert [examples.examples(client).tolist() for client in range(3)] == [[3], [0, 2], [1, 4]]


def test_a_run_of_hospitals_has_them_as_clients_with_patients_as_the_unit(tmp_path: Path) -> None:
    rows = [
        (("north", "south", "east")[number % 3], f"p{number // 6}-{number % 3}", 30 + number, said)
        for number, said in enumerate(["no", "yes"] * 90)
    ]
    run = simulate(
        "experiment=hospitals_secure",
        *SITES.split(),
        f"data.path={table(tmp_path / 'data', rows)}",
        "privacy.delta=1e-3",
        "rounds=1",
        "seed=50087",
        f"output_dir={tmp_path / 'run'}",
    )
    assert RunFolder(run).read_metrics()[-1]["replies"] == 3


WRONG = {
    "data.partition=site data.site=hospital data.num_clients=4": "data.num_clients must be 3 with "
    "data.site=hospital",
    "data.partition=site data.site=clinic data.num_clients=3": "has no column or array clinic",
    "data.partition=site": "data.site must be given with data.partition=site",
    "data.site=hospital": "data.partition must be site with data.site",
}


@pytest.mark.parametrize(("words", "message"), WRONG.items())
def test_what_is_no_site_is_refused(words: str, message: str, tmp_path: Path) -> None:
    folder = table(tmp_path / "data")
    with pytest.raises(ConfigError, match=message):
        simulate("experiment=silos", "data.name=folder", f"data.path={folder}", *words.split())


def test_a_wrong_number_of_owners_is_told_with_other_partitions(tmp_path: Path) -> None:
    folder = table(tmp_path / "data")
    words = ["data.partition=natural", "data.num_clients=2"]
    with pytest.raises(ConfigError, match=r"not 2 .*data\.partition=owners, which deals them"):
        simulate("experiment=silos", "data.name=folder", f"data.path={folder}", *words)


def test_an_owner_at_two_sites_and_other_data_are_refused(tmp_path: Path) -> None:
    folder = table(tmp_path / "data", [*ROWS, ("south", "a", 50, "no")])
    asked = ("experiment=silos", *SITES.split())
    with pytest.raises(ConfigError, match=r"1 owners .*two sites"):
        simulate(*asked, "data.name=folder", f"data.path={folder}")
    with pytest.raises(ConfigError, match=r"column must be in data\.path"):
        simulate(*asked)
