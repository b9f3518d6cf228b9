"""Runs whose unit is an owner: all rows of an owner lie at one client, and what is said of the run
speaks of owners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from discreet.audit.example_audit import audit_examples
from discreet.audit.verdict import judge
from discreet.cli.status import status_lines
from discreet.data.datasets import load_task
from discreet.data.partition import client_examples_of, partition_indices
from discreet.ledger.charges import LedgerError
from discreet.ledger.durable_ledger import DurableLedger
from discreet.reporting.records import read_runs
from discreet.reporting.spending import choice_costs
from discreet.run_files.call import Call
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.server.resolve import resolve
from discreet.settings.data import DataConfig
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate
from tests.tables.made_tables import make_project

PEOPLE = 60


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("table"), people=PEOPLE)


def settings(table: Path, *words: str) -> tuple[Settings, Call]:
    small = ("rounds=2", "training.batch_size=10", "seed=40127", "privacy.delta=1e-3")
    return load_asked(["experiment=hospitals", f"data.path={table}", *small, *words])


@pytest.fixture(scope="module")
def run(table: Path) -> Path:
    simulate(*settings(table, f"output_dir={table / 'run'}"))
    return table / "run"


def test_all_rows_of_an_owner_are_dealt_to_one_client(table: Path) -> None:
    task = load_task("folder", path=str(table))
    owners = task.owners
    assert owners is not None
    dealt = client_examples_of(task, DataConfig("folder", num_clients=3, partition="owners"))
    held = [set(owners[torch.from_numpy(dealt.examples(client))].tolist()) for client in range(3)]
    assert [len(each) for each in held] == [20, 20, 20]
    assert len(set.union(*held)) == PEOPLE
    few = DataConfig("folder", num_clients=61, partition="owners")
    with pytest.raises(ValueError, match="61 clients cannot share 60 owners"):
        partition_indices(task.train.targets, few, owners=owners)


def test_privacy_json_status_and_ledger_speak_of_the_owner(run: Path) -> None:
    facts = json.loads((run / "privacy.json").read_text())["guarantees"][1]
    assert facts["unit"] == "one owner of one client, with all its rows"
    assert (
        facts["adjacency"] == "zero-out: one owner, with all its rows, contributes nothing, n stays"
    )
    assert any(
        "left (one owner of one client, with all its rows)" in line
        for line in status_lines(RunFolder(run))
    )
    names = {each.data_owner for each in DurableLedger(run / "clients.db").releases()}
    assert names == {f"{client} (each owner's rows as one)" for client in range(3)}


def test_the_account_counts_owners(run: Path) -> None:
    spent = DurableLedger(run / "clients.db").spent(
        "example", data_owner="0 (each owner's rows as one)"
    )
    ((event, steps),) = spent.entries
    assert event.sampling_probability == 10 / 20  # type: ignore[attr-defined]
    assert steps == 2 * 2
    assert spent.epsilon(1e-3) == pytest.approx(2, rel=1e-3)


def test_owners_who_are_dealt_to_several_clients_are_warned_of_at_user_level(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [
        "data.name=folder",
        f"data.path={table}",
        "model.name=linear",
        "rounds=1",
        "seed=40127",
    ]
    few = ["data.num_clients=3", "privacy.user.too_noisy=warn", "privacy.delta=1e-3"]
    for partition in ("iid", "owners"):
        caplog.clear()
        folder = tmp_path / partition
        dealt = [f"data.partition={partition}", f"output_dir={folder}"]
        simulate(*load_asked([*words, *few, *dealt]))
        said = "data.partition=iid deals the rows of one patient_id to several" in caplog.text
        assert said == (partition == "iid")


def test_rows_that_run_without_their_owner_are_warned_of_in_one_line(
    table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("privacy.example.unit=row", "rounds=1", f"output_dir={tmp_path / 'run'}")
    with caplog.at_level("WARNING", "discreet"):
        simulate(*settings(table, *words))
    said = [line for line in caplog.messages if "privacy.example.unit=owner" in line]
    assert len(said) == 1
    assert "of 60 owners have several, up to" in said[0]


def test_a_run_of_rows_and_one_of_owners_do_not_add_up(
    table: Path, run: Path, tmp_path: Path
) -> None:
    simulate(*settings(table, "privacy.example.unit=row", f"output_dir={tmp_path / 'rows'}"))
    (said,) = choice_costs(read_runs([run, tmp_path / "rows"]))
    assert "epsilon not stated for all 2 runs" in said
    assert "different units: one owner of one client, with all its rows; or one example of" in said


def test_an_engine_that_does_not_know_owners_is_refused_by_name(table: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine=batched .*privacy\.example\.unit"):
        simulate(*settings(table, "engine=batched"))


def test_a_resumed_run_keeps_its_unit(table: Path, run: Path) -> None:
    words = ("resume=true", f"output_dir={run}", "privacy.example.unit=row", "rounds=3")
    with pytest.raises(LedgerError, match=r"privacy\.example\.unit"):
        simulate(*settings(table, *words))


@pytest.mark.parametrize("declared", [(), ("data.public_num_examples=20",)])
def test_an_audit_puts_canaries_in_the_place_of_owners(
    declared: tuple[str, ...], table: Path
) -> None:
    words = ("privacy.example.target_epsilon=null", "privacy.example.noise_multiplier=1")
    plan, task = resolve(settings(table, "rounds=4", *words, *declared)[0])
    found = audit_examples(plan, task, canaries=20)
    assert found.settings["owners"] == 20
    assert found.observations[-1].claim.adjacency.count("one owner, with all its rows") == 1
    assert not judge(found).refuted
