"""The page of the four hospitals says what its runs measured, and what FLamby's steps really cost."""

from __future__ import annotations

import math
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from benchmarks.heart_choice import Settings, trained, training_patients
from benchmarks.heart_curve import (
    EPSILONS,
    SEEDS,
    WITHOUT_NOISE,
    measured,
    own_settings,
    picture_of,
    read_rows,
    summary,
)
from discreet.config import load_config
from discreet.federated.predictions import load_model
from discreet.privacy.calibration import noise_multiplier_for_epsilon
from discreet.privacy.events import poisson_round_event
from discreet.simulation.in_process import simulate
from discreet.tasks.datasets import load_task
from discreet.tasks.heart import HOSPITALS

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE = DOCS / "systems" / "heart.md"
TEST = (104, 89, 16, 45)
ROWS = read_rows(DOCS / "results" / "heart.csv")
# Patients, and what 1500 steps of FLamby's cost where epsilon 1 and 10 was planned: the shared reference numbers.
FLAMBY = {199: (1.50, 14.8), 172: (1.64, 16.2), 30: (4.56, 53.9), 85: (2.44, 25.3)}


def test_the_pages_table_is_what_the_runs_measured() -> None:
    assert [line for line in PAGE.read_text().splitlines() if line in summary(ROWS)] == summary(ROWS)


def test_every_epsilon_has_five_runs_and_no_hospital_spent_more_than_the_target() -> None:
    assert [(float(row["target"]), int(row["seed"])) for row in ROWS] == [(e, seed) for e in EPSILONS for seed in SEEDS]
    assert all(float(row[name]) <= float(row["target"]) for row in ROWS for name in row if name.startswith("epsilon"))


def test_the_picture_has_the_pooled_test_set_each_hospital_and_what_the_lines_are() -> None:
    picture = picture_of(ROWS)
    assert [label for number, label in picture.legend if number > 0] == list(HOSPITALS)
    assert "FLamby's best" in picture.legend[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize(("patients", "planned"), [(n, epsilon) for n in FLAMBY for epsilon in (1, 10)])
def test_flambys_steps_cost_more_than_their_label(patients: int, planned: int) -> None:
    # Batches of 4, noise for 15 epochs, 1500 steps taken; as if batches were Poisson.
    batches = math.ceil(patients / 4)
    noise = noise_multiplier_for_epsilon(
        planned,
        make_event=lambda multiplier: poisson_round_event(1 / batches, noise_multiplier=multiplier),
        count=15 * batches,
        delta=1e-3,
        accountant="pld",
    )
    step = dp_accounting.PoissonSampledDpEvent(1 / batches, dp_accounting.GaussianDpEvent(noise))
    found = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(step, 1500)).get_epsilon(1e-3)
    published = FLAMBY[patients][planned == 10]
    assert found == pytest.approx(published, rel=4e-3)
    assert f"{published:g}" in PAGE.read_text()


def test_the_experiment_has_the_settings_that_cross_validation_found_best() -> None:
    best = max(read_rows(DOCS / "results" / "heart_choice.csv"), key=lambda row: float(row["mean"]))
    config = load_config(["experiment=heart"])
    found = (config.rounds, config.server.momentum, config.training.learning_rate, config.privacy.example.l2_norm_clip)
    assert found == tuple(float(best[name]) for name in ("rounds", "momentum", "learning_rate", "clip"))


def test_own_settings_are_those_of_each_epsilons_best_row(tmp_path: Path) -> None:
    choice = tmp_path / "choice.csv"
    choice.write_text(
        "rounds,momentum,learning_rate,clip,epsilon inf,epsilon 1,mean\n20,0.5,3,0.3,79,78,78.5\n40,0.9,1,2,80,70,75\n"
    )
    first = ["rounds=20", "server.momentum=0.5", "training.learning_rate=3", "privacy.example.l2_norm_clip=0.3"]
    second = ["rounds=40", "server.momentum=0.9", "training.learning_rate=1", "privacy.example.l2_norm_clip=2"]
    assert own_settings(choice) == {1.0: first, math.inf: second}


def test_a_run_is_measured_with_the_ledgers_of_all_hospitals(shared_data: Path) -> None:
    row = measured(shared_data / "heart", 2.0, 71917, more=("rounds=2",))
    assert {row[name] for name in row if name.startswith("epsilon")} == {"2"}
    own = [float(row[f"accuracy {name}"]) for name in HOSPITALS]
    assert float(row["accuracy"]) == pytest.approx(
        sum(map(math.prod, zip(own, TEST, strict=True))) / sum(TEST), abs=1e-4
    )


def test_cross_validation_looks_at_training_patients_alone(shared_data: Path) -> None:
    patients, task = training_patients(str(shared_data / "heart")), load_task("heart", path=str(shared_data / "heart"))
    assert np.allclose(patients.inputs[:, :-1], task.train.inputs.numpy())
    assert patients.labels.tolist() == task.train.targets.tolist()


def test_the_models_of_cross_validation_step_as_the_experiments_do(shared_data: Path, tmp_path: Path) -> None:
    # Both without noise, to convergence of neither: the experiment begins at random weights, the other at zero.
    data, run = str(shared_data / "heart"), tmp_path / "run"
    simulate(load_config(["experiment=heart", f"data.path={data}", f"output_dir={run}", "seed=5021", *WITHOUT_NOISE]))
    mine = trained(training_patients(data), Settings(60, 0.9, 1.0, 0.5), math.inf, np.random.default_rng(0))
    saved = list(load_model(run).model.parameters())
    weights = torch.cat([(saved[0][1] - saved[0][0]), (saved[1][1] - saved[1][0]).reshape(1)]).detach().double()
    assert float(torch.corrcoef(torch.stack([weights, torch.from_numpy(mine[0])]))[0, 1]) > 0.99
