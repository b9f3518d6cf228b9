"""The experiment for tables, on a table like a hospital's: 10 % positive, and nearly as good as
without privacy."""

from __future__ import annotations

from pathlib import Path

import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from discreet.data.datasets import load_task
from discreet.run_files.run_folder import RunFolder
from discreet.settings.compose import load_asked, load_config
from discreet.simulation.in_process import simulate
from tests.tables.made_tables import make_project

PEOPLE = 900


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("table"), people=PEOPLE, tested=600)


def pooled_auc(table: Path) -> float:
    """Of logistic regression over all rows in one place, without privacy."""
    task = load_task("folder", path=str(table))
    model = LogisticRegression(max_iter=1000).fit(
        task.train.inputs.numpy(), task.train.targets.numpy()
    )
    return float(
        roc_auc_score(
            task.test.targets.numpy(), model.predict_proba(task.test.inputs.numpy())[:, 1]
        )
    )


@pytest.mark.parametrize(("epsilon", "lost"), [(8.0, 0.03), (2.0, 0.07), (0.5, 0.2)])
def test_auc_is_near_that_of_pooled_regression_and_the_loss_below_a_constants(
    epsilon: float, lost: float, table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["experiment=table", f"data.path={table}", f"data.num_clients={PEOPLE}", "seed=40127"]
    with caplog.at_level("WARNING", "discreet"):
        simulate(
            *load_asked(
                [*words, f"privacy.user.target_epsilon={epsilon}", f"output_dir={tmp_path / 'run'}"]
            )
        )
    last = RunFolder(tmp_path / "run").read_metrics()[-1]
    assert last["epsilon_user"] == pytest.approx(epsilon, abs=0.01)
    assert last["auc"] is not None
    assert last["auc"] > pooled_auc(table) - lost
    assert not any("constant guess" in line for line in caplog.messages)


def test_three_hospitals_protect_each_patient_and_learn_at_epsilon_2(
    table: Path, tmp_path: Path
) -> None:
    words = ["experiment=hospitals", f"data.path={table}", "seed=40127"]
    simulate(*load_asked([*words, f"output_dir={tmp_path / 'run'}"]))
    last = RunFolder(tmp_path / "run").read_metrics()[-1]
    assert last["epsilon_example"] == pytest.approx(2, abs=0.01)
    assert last["auc"] is not None
    assert last["auc"] > pooled_auc(table) - 0.06


def test_delta_follows_from_the_number_of_people() -> None:
    words = ["experiment=table", f"data.path={Path(__file__).parent}"]
    deltas = {
        count: load_config([*words, f"data.num_clients={count}"]).privacy.delta
        for count in (300, 897, 20_000)
    }
    assert deltas == {300: 1e-4, 897: 1e-4, 20_000: 1e-6}
