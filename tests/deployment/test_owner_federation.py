"""Three hospitals as real nodes, each with a table of several visits a patient: a patient with all
visits is the unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from discreet.deployment.local_federation import main
from discreet.ledger.durable_ledger import DurableLedger
from discreet.ledger.owner_account import BY_OWNER
from discreet.run_files.run_folder import RunFolder, state_of
from tests.tables.made_tables import TOML, make_project, write_table

PATIENTS = (20, 25, 30)


def hospitals(folder: Path) -> Path:
    for number, patients in enumerate(PATIENTS):
        own = folder / f"hospital-{number}"
        own.mkdir(parents=True)
        write_table(own / "train.csv", patients, first=100 * number)
        (own / "data.toml").write_text(TOML.replace('test = "test.csv"\n', ""))
    return folder


@pytest.mark.slow
def test_each_hospital_accounts_for_a_patient_with_all_visits(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    make_project(public, people=30)  # the server's own: its shapes, and the public test set
    run = RunFolder(tmp_path / "run")
    words = ("experiment=hospitals", f"data.path={public}", "rounds=2", f"output_dir={run.path}")
    asked = ("training.batch_size=10", "privacy.delta=1e-3", "privacy.example.target_epsilon=3")
    assert main(["--data", str(hospitals(tmp_path / "nodes")), *words, *asked]) == 0
    assert state_of(run) == "finished"
    assert [row["replies"] for row in run.read_metrics()] == [3, 3]
    for number, patients in enumerate(PATIENTS):
        ledger = DurableLedger(run.path / "nodes" / f"node-{number}.db")
        ((event, steps),) = ledger.spent("example", data_owner=BY_OWNER).entries
        assert event.sampling_probability == 10 / patients  # type: ignore[attr-defined]
        assert steps == 2 * -(-patients // 10)
    example = json.loads((run.path / "privacy.json").read_text())["guarantees"][1]
    assert example["unit"] == "one owner of one client, with all its rows"
    assert example["epsilon"]["pld"] == pytest.approx(3, rel=1e-3)
