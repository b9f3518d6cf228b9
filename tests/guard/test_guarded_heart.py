"""Four hospitals as guarded sites, each a process, with a kernel for each block: an ordinary app
trains on their own patients, with Flower's own averaging and under secure aggregation.

It takes a quarter of an hour. docs/results/guarded_heart.csv has what one run of each printed. The
epsilon is that of the ledger; under secure aggregation it has the rounds of the run before, too.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.data.examples import Examples, Task
from discreet.data.heart import HOSPITALS, load_heart
from discreet.deployment.local_federation import Federation
from discreet.guard.patient_blocks import split_site
from discreet.guard.site_records import JOURNAL, read_rows
from discreet.ledger.durable_ledger import DurableLedger
from discreet.ledger.rollback_guard import STATE_VARIABLE
from tests.guard import guarded_sites
from tests.guard.guarded_sites import PATIENTS_APP, guarded_federation, open_folder, run
from tests.guard.made import guard_toml
from tests.guard.test_attacks import can_not
from tests.guard.test_guarded_federation import secure_copy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BLOCKS, BLOCK_SECONDS, DELTA = 12, 8.0, 1e-3
ROUNDS, NOISE = 4, 2.89  # epsilon 2
MASKED_ROUNDS, MASKED_NOISE = 2, 0.45  # of a whole site: k / 2 times as much of a patient
LEAST_NOISE = 2.5
RUN_SECONDS = 3000.0


def owned_by(task: Task, hospital: int) -> Examples:
    """The training patients of one hospital."""
    assert task.train.owners is not None
    return task.train.subset(torch.nonzero(task.train.owners == hospital).flatten())


def written(path: Path, examples: Examples) -> Path:
    """Patients as the table that the app reads."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        names = [f"feature{number}" for number in range(examples.inputs.shape[1])]
        table.writerow(["patient", *names, "disease"])
        for number, (row, label) in enumerate(zip(examples.inputs, examples.targets, strict=True)):
            table.writerow([f"p{number}", *row.tolist(), int(label)])
    return path


@pytest.fixture(scope="module")
def hospitals(shared_data: Path) -> Iterator[tuple[Federation, list[Path], Path]]:
    if reason := can_not("kernel"):
        pytest.skip(reason)
    task = load_heart(str(shared_data / "heart"))
    with open_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded_sites, "RUN_SECONDS", RUN_SECONDS)
        made = []
        for number, name in enumerate(HOSPITALS):
            examples = owned_by(task, number)
            place = folder / name
            place.mkdir(mode=0o700)
            table = written(place / "train.csv", examples)
            split_site(table, place / "site", id_column="patient", count=BLOCKS)
            table.unlink()
            patch.setenv(STATE_VARIABLE, str(place / "state"))
            DurableLedger.create(place / "ledger.db")
            settings = {"block_seconds": BLOCK_SECONDS, "max_delta": DELTA, "max_epsilon": 9.0}
            guard_toml(place, blocks=BLOCKS, min_noise_multiplier=LEAST_NOISE, **settings)
            made.append(place)
        test = written(folder / "test.csv", task.test)
        with guarded_federation(folder / "federation", made) as federation:
            yield federation, made, test


def told(
    how: str, said: str, sites: Sequence[Path], *, started: float, patch: pytest.MonkeyPatch
) -> PrivacyLedger:
    """Prints a row of docs/results/guarded_heart.csv; returns what the last site has spent."""
    accuracies = [float(each) for each in re.findall(r"round \d+: accuracy ([0-9.]+)", said)]
    minutes = (time.monotonic() - started) / 60
    for site in sites:
        patch.setenv(STATE_VARIABLE, str(site / "state"))
        spent = DurableLedger(site / "ledger.db").spent("patient")
    ended = [row for site in sites for row in read_rows(site / "site-records" / JOURNAL) if row]
    lost = sum(int(str(row.get("failed", 0))) for row in ended)
    last = accuracies[-1] if accuracies else float("nan")
    print(
        f"{how},{last:.4f},{spent.epsilon(DELTA, 'rdp'):.3f},{minutes:.1f} minutes, {lost} lost blocks so far"
    )
    return spent


def test_four_hospitals_train_in_kernels_by_flowers_own_averaging(
    hospitals: tuple[Federation, list[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, sites, test = hospitals
    started = time.monotonic()
    config = {"test": str(test), "guard_noise_multiplier": NOISE, "num_server_rounds": ROUNDS}
    said = run(federation, "averaged", PATIENTS_APP, **config)
    spent = told("FedAvgM", said, sites, started=started, patch=monkeypatch)
    assert len(re.findall("Received 4 results and 0 failures", said)) == ROUNDS, said
    assert spent.epsilon(DELTA) == pytest.approx(2.0, rel=1e-2)


def test_four_hospitals_train_in_kernels_under_secure_aggregation(
    hospitals: tuple[Federation, list[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation, sites, test = hospitals
    started = time.monotonic()
    config = {"test": str(test), "guard_noise_multiplier": MASKED_NOISE}
    config["num_server_rounds"] = MASKED_ROUNDS
    said = run(federation, "masked", secure_copy(tmp_path), **config)
    spent = told("secure aggregation", said, sites, started=started, patch=monkeypatch)
    assert f"round {MASKED_ROUNDS}/{MASKED_ROUNDS}" in said, said
    assert sum(count for _, count in spent.entries) >= MASKED_ROUNDS
