"""The four hospitals: prepared as FLamby prepares them, and scaled by constants that the data have no part in."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.data.datasets import load_task
from discreet.data.examples import Examples
from discreet.data.heart import HOSPITALS, patients, read_hospital, train_and_test
from discreet.data.partition import client_examples_of
from discreet.settings.data import DataConfig

TRAIN, TEST = (199, 172, 30, 85), (104, 89, 16, 45)  # FLamby's table of Fed-Heart-Disease
BY_HOSPITAL = DataConfig(name="heart", num_clients=4, partition="natural")


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "heart"


def raw_rows(folder: Path, name: str) -> list[list[str]]:
    """The lines of a hospital's file without a missing value in the columns that are kept."""
    with (folder / f"processed.{name}.data").open(newline="") as file:
        return [row for row in csv.reader(file) if "?" not in (*row[:10], row[13])]


def by_hand(row: list[str]) -> list[float]:
    """A line of the file as the model should see it, written out feature by feature."""
    age, sex, kind, pressure, cholesterol, sugar, ecg, rate, angina, depression = map(float, row[:10])
    scaled = [
        (age - 55) / 35,  # 20 to 90
        sex,
        (pressure - 140) / 60,  # 80 to 200
        (cholesterol - 250) / 150,  # 100 to 400
        sugar,
        (rate - 140) / 80,  # 60 to 220
        angina,
        (depression - 2.5) / 2.5,  # 0 to 5
        *(1.0 if kind == number else 0.0 for number in (2, 3, 4)),
        *(1.0 if ecg == number else 0.0 for number in (1, 2)),
    ]
    return [min(1.0, max(-1.0, value)) for value in scaled]


def test_each_hospital_has_as_many_patients_as_flamby_counts(folder: Path) -> None:
    task = load_task("heart", path=str(folder))
    assert task.owners is not None
    assert tuple(task.owners.bincount().tolist()) == TRAIN
    assert tuple(client_examples_of(task, BY_HOSPITAL).sizes(np.arange(4))) == TRAIN
    hospitals = [read_hospital(folder / f"processed.{name}.data") for name in HOSPITALS]
    assert tuple(len(labels) for _, labels in hospitals) == (303, 261, 46, 130)
    tests = [train_and_test(labels)[1] for _, labels in hospitals]
    assert tuple(map(len, tests)) == TEST
    parts = [patients(every[rows], labels[rows]) for (every, labels), rows in zip(hospitals, tests, strict=True)]
    assert torch.equal(task.test.inputs, torch.cat([part.inputs for part in parts]))
    assert len(task.test) == sum(TEST)
    with pytest.raises(ValueError, match=r"data\.path: heart is read from a folder"):
        load_task("heart")


def test_patients_are_their_lines_of_the_file_by_hand(folder: Path) -> None:
    for name in HOSPITALS:
        rows, every = raw_rows(folder, name), patients(*read_hospital(folder / f"processed.{name}.data"))
        assert len(every) == len(rows)
        for number in (0, 1, 17, len(rows) - 1):
            assert every.inputs[number].tolist() == pytest.approx(by_hand(rows[number]), abs=1e-6)
        assert every.targets.tolist() == [int(float(row[13]) > 0) for row in rows]


def test_a_change_of_one_patient_changes_nothing_of_another(folder: Path, tmp_path: Path) -> None:
    def cleveland(lines: list[str]) -> Examples:
        (tmp_path / "processed.cleveland.data").write_text("\n".join(lines) + "\n")
        return patients(*read_hospital(tmp_path / "processed.cleveland.data"))

    lines = (folder / "processed.cleveland.data").read_text().splitlines()
    outlier = "9999.0,1.0,1.0,9999.0,9999.0,1.0,2.0,9999.0,0.0,9999.0,3.0,0.0,6.0,4.0"
    before, after = cleveland(lines), cleveland([outlier, *lines[1:]])
    assert torch.equal(before.inputs[1:], after.inputs[1:])
    assert float(after.inputs.abs().max()) <= 1
