"""Experiments keep what they promise: accuracy within their budgets, and what each of four
hospitals spends."""

from __future__ import annotations

import math
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from discreet.accounting.calibration import noise_multiplier_for_epsilon
from discreet.accounting.events import poisson_round_event
from discreet.ledger.durable_ledger import CLIENTS_LEDGER, DurableLedger
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.settings.adjacency import EXAMPLE
from discreet.simulation.in_process import simulate

PATIENTS = (199, 172, 30, 85)
DELTA, ROUNDS, BATCH = 1e-3, 2, 20
PAGE = Path(__file__).resolve().parents[2] / "docs" / "results.md"
# Patients, and what 1500 steps of FLamby's cost where epsilon 1 and 10 was planned: the shared
# reference numbers.
FLAMBY = {199: (1.50, 14.8), 172: (1.64, 16.2), 30: (4.56, 53.9), 85: (2.44, 25.3)}
# Batches drawn by each hospital's own n, in place of a step over all its patients.
SAMPLED = ("data.public_num_examples=null", f"training.batch_size={BATCH}", f"rounds={ROUNDS}")


def oracle(noise_multiplier: float, *, patients: int) -> float:
    """dp-accounting's PLD for the steps that a hospital takes with Poisson batches of expected size
    20."""
    step = dp_accounting.PoissonSampledDpEvent(
        BATCH / patients, dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    steps = dp_accounting.SelfComposedDpEvent(step, ROUNDS * math.ceil(patients / BATCH))
    return float(PLDAccountant().compose(steps).get_epsilon(DELTA))


def epsilons(shared_data: Path, folder: Path, *words: str) -> list[float]:
    where = (f"data.path={shared_data / 'heart'}", f"output_dir={folder}", "seed=30689")
    simulate(*load_asked(["experiment=heart", *where, *words]))
    ledger = DurableLedger(folder / CLIENTS_LEDGER)
    spent = [ledger.spent(EXAMPLE, data_owner=str(hospital)) for hospital in range(len(PATIENTS))]
    return [each.epsilon(DELTA, "pld") for each in spent]


def test_with_batches_each_hospital_spends_by_its_own_number_of_patients(
    shared_data: Path, tmp_path: Path
) -> None:
    noise = ("privacy.example.target_epsilon=null", "privacy.example.noise_multiplier=2")
    found = epsilons(shared_data, tmp_path / "run", *SAMPLED, *noise)
    assert found == pytest.approx([oracle(2.0, patients=count) for count in PATIENTS], rel=2e-3)
    assert max(found) > 2 * min(found)


def test_with_batches_a_target_is_met_by_noise_of_each_hospitals_own(
    shared_data: Path, tmp_path: Path
) -> None:
    found = epsilons(shared_data, tmp_path / "run", *SAMPLED, "privacy.example.target_epsilon=2")
    assert found == pytest.approx([2.0] * 4, rel=2e-3)
    assert max(found) <= 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patients", "planned"), [(n, epsilon) for n in FLAMBY for epsilon in (1, 10)]
)
def test_flambys_steps_cost_more_than_their_label(patients: int, planned: int) -> None:
    # Batches of 4, noise for 15 epochs, 1500 steps taken; as if batches were Poisson.
    batches = math.ceil(patients / 4)
    noise = noise_multiplier_for_epsilon(
        planned,
        releases=lambda z: ((poisson_round_event(1 / batches, noise_multiplier=z), 15 * batches),),
        delta=DELTA,
    )
    step = dp_accounting.PoissonSampledDpEvent(1 / batches, dp_accounting.GaussianDpEvent(noise))
    found = (
        PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(step, 1500)).get_epsilon(DELTA)
    )
    published = FLAMBY[patients][planned == 10]
    assert found == pytest.approx(published, rel=4e-3)


def test_the_page_says_the_least_and_the_most_that_flambys_label_of_1_costs() -> None:
    costs = [cost for cost, _ in FLAMBY.values()]
    said = f"is {min(costs):.2f} to {max(costs):.2f} by dp-accounting"
    assert said in " ".join(PAGE.read_text().split())


INFINITE = float("inf")
# Least accuracy, and most epsilon at user and at example level. `both`: a client that is drawn in
# 19 of the 30 rounds; one that is drawn in all of them would spend 9.4.
PROMISES = {
    "silos": (0.85, INFINITE, 6),
    "organisations": (0.85, 8, INFINITE),
    "fixed_clipping": (0.88, 8, INFINITE),
    "both": (0.80, 8, 7),
    "mnist_users": (0.905, 2, INFINITE),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "organisations" else pytest.mark.slow)
        for name in PROMISES
    ],
)
def test_an_experiment_reaches_its_accuracy_within_its_budgets(
    name: str, tmp_path: Path, shared_data: Path
) -> None:
    accuracy, user, example = PROMISES[name]
    data = [f"data.path={shared_data / 'mnist'}"] if name == "mnist_users" else []
    simulate(
        *load_asked([f"experiment={name}", *data, "seed=48017", f"output_dir={tmp_path / 'run'}"])
    )
    row = RunFolder(tmp_path / "run").read_metrics()[-1]
    assert float(str(row["accuracy"])) >= accuracy
    for spent, most in (("epsilon_user", user), ("epsilon_example", example)):
        epsilon = float(str(row[spent]))
        assert epsilon == INFINITE if most == INFINITE else epsilon <= most
