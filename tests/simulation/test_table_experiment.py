"""The experiment for tables, on a table like a hospital's: 10 % positive, and nearly as good as
without privacy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from discreet.data.datasets import load_task
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder
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


BETWEEN = pytest.param(2.0, 0.07, marks=pytest.mark.slow)  # the same path as the ends
SMALL = pytest.param(0.5, 0.2, marks=pytest.mark.processes)


@pytest.mark.parametrize(("epsilon", "lost"), [(8.0, 0.03), BETWEEN, SMALL])
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


def written(folder: Path, target: str) -> Path:
    """A table of 900 people with a U-shape, and a target of another kind than two classes."""
    for name, seed in (("train", 40127), ("test", 40128)):
        draws = np.random.default_rng(seed)
        sodium = draws.normal(140, 6, 900)
        age = draws.uniform(20, 90, 900)
        risk = ((sodium - 140) / 6) ** 2 + age / 30 + draws.normal(0, 1, 900)
        days = [f"{max(value, 0) + 1:.1f}" for value in risk]
        grades = np.array(["low", "some", "high"])[np.digitize(risk, (2, 3.5))]
        columns = zip(sodium, age, days, grades, strict=True)
        rows = [
            f"p{row},{na:.0f},{old:.0f},{day},{grade}"
            for row, (na, old, day, grade) in enumerate(columns)
        ]
        text = "\n".join(["who,na,age,days,grade", *(row.replace("p", f"{name}") for row in rows)])
        (folder / f"{name}.csv").write_text(text + "\n")
    (folder / "data.toml").write_text(
        f'format = "csv"\nfile = "train.csv"\ntest = "test.csv"\nowner = "who"\n{target}\n[columns]\n'
        'na = { kind = "number", low = 110, high = 170, curves = 3 }\nage = [18, 100]\n'
    )
    return folder


KINDS = {
    "days": ('target = "days"\ntarget_low = 0\ntarget_high = 40', "r2", 0.3),
    "grade": ('target = "grade"\nclasses = ["low", "some", "high"]', "accuracy", 0.55),
}


@pytest.mark.parametrize("kind", ["days", pytest.param("grade", marks=pytest.mark.processes)])
def test_a_number_and_three_classes_are_learned_with_the_same_words(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, score, least = KINDS[kind]
    words = ["experiment=table", f"data.path={written(tmp_path, target)}", "data.num_clients=900"]
    with caplog.at_level("WARNING", "discreet"):
        simulate(*load_asked([*words, "seed=40127", f"output_dir={tmp_path / 'run'}"]))
    first, *_, last = RunFolder(tmp_path / "run").read_metrics()
    # From the middle of a range that lies far above most values, without a swing.
    assert last[score] > least
    assert last["loss"] < first["loss"]
    assert not any("same answer" in line or "constant guess" in line for line in caplog.messages)


@pytest.mark.processes  # a whole federation, as those above
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


def test_a_run_of_the_rule_is_resumed_with_the_step_that_it_had(
    table: Path, tmp_path: Path
) -> None:
    words = ["experiment=table", f"data.path={table}", f"data.num_clients={PEOPLE}", "seed=40127"]
    words += [f"output_dir={tmp_path / 'run'}", "privacy.user.max_epsilon=50"]
    simulate(*load_asked([*words, "rounds=2"]))
    before = RunFolder(tmp_path / "run").read_config()
    simulate(*asked_settings([*words, "rounds=3", "resume=true"]))
    after = RunFolder(tmp_path / "run").read_config()
    assert (after.server, after.privacy.user.clip) == (before.server, before.privacy.user.clip)
    assert before.server.learning_rate is not None
    assert [row["round"] for row in RunFolder(tmp_path / "run").read_metrics()] == [1, 2, 3]
