"""Clip norm and step of a linear model of a table follow from public facts."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.data.columns import columns_of
from discreet.data.description import DataDescription, description_of
from discreet.data.encoding import encoded_columns
from discreet.data.examples import Examples, Task, TaskShape
from discreet.planning.linear_outlook import output_noise
from discreet.planning.noise_outlook import noise_outlook
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerSGD
from discreet.run_files.call import Call
from discreet.run_files.compose import load_config
from discreet.server.resolve import resolve
from discreet.server.session import prepare
from discreet.server.table_rule import linear_model, noise_bound
from discreet.settings.rules import ConfigError
from tests.tables.made_tables import make_project


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("table"), people=300)


def plan_of(folder: Path, *words: str, clients: int = 300) -> Plan:
    asked = ["experiment=table", f"data.path={folder}", f"data.num_clients={clients}"]
    return resolve(load_config([*asked, *words]))[0]


COLUMNS = {
    "age": [0, 100],
    "smokes": [0, 1],
    "ward": ["surgery", "internal"],
    "day": {"kind": "date", "low": "2020-01-01", "high": "2020-12-31"},
}


def table(described: dict[str, object]) -> Task:
    description = description_of(
        {"format": "csv", "file": "a.csv", "target": "y", "classes": ["no", "yes"]} | described
    )
    assert isinstance(description, DataDescription)
    width = sum(len(column.outputs) for column in description.columns) or 4
    rows = Examples(torch.zeros(2, width), torch.tensor([0, 1]))
    return Task("folder", rows, rows, TaskShape((width,), 2), description)


def test_the_norm_of_a_row_is_that_of_rows_spread_over_the_declared_ranges() -> None:
    draws = np.random.default_rng(40127)
    cells = {
        "age": draws.normal(50, 100 / 6, 4000),
        "smokes": draws.integers(0, 2, 4000),
        "ward": draws.choice(["surgery", "internal", "elsewhere"], 4000),
        "day": [
            f"2020-{month:02d}-15" for month in draws.normal(6.5, 2, 4000).clip(1, 12).astype(int)
        ],
    }
    rows = encoded_columns(cells, columns_of(COLUMNS))
    model = linear_model(load_config(["experiment=table"]), table({"columns": COLUMNS}))
    assert model is not None
    assert model.row_norm == pytest.approx(math.sqrt(1 + (rows**2).sum(1).mean()), rel=0.03)


def test_inputs_with_ranges_of_their_own_count_the_same() -> None:
    given = {"low": [0, 0, 0, 0], "high": [100, 1, 1, 1]}
    model = linear_model(load_config(["experiment=table"]), table(given))
    assert model is not None
    assert model.row_norm == pytest.approx(math.sqrt(1 + 1 / 9 + 3))


def test_the_expected_noise_of_a_logit_is_that_of_steps_on_noise_alone(folder: Path) -> None:
    plan = plan_of(folder)
    optimizer = plan.optimizer
    assert plan.linear is not None
    assert isinstance(optimizer, ServerSGD)
    draws = np.random.default_rng(40127)
    noise = plan.mechanism.expected_noise(plan.first_clip_norm)
    velocity = params = np.zeros((4000, 2))
    for _ in range(plan.run.rounds):
        drawn = draws.standard_normal(params.shape) * noise.multiplier * noise.norm
        velocity = optimizer.momentum * velocity + drawn / noise.denominator
        params = params + optimizer.learning_rate * velocity
    found = plan.linear.row_norm * (params[:, 1] - params[:, 0]).std()
    # Above it: the first rounds of momentum are shorter, 6 % in all. The seed fixes the draws.
    expected = output_noise(plan, plan.linear, optimizer)
    assert 0.85 * expected < found < expected


@pytest.mark.parametrize("epsilon", [8.0, 1.0, 0.2])
def test_the_step_is_as_long_as_the_bound_on_noise_allows(epsilon: float, folder: Path) -> None:
    plan = plan_of(folder, f"privacy.user.target_epsilon={epsilon}")
    assert plan.linear is not None
    assert isinstance(plan.optimizer, ServerSGD)
    noise = output_noise(plan, plan.linear, plan.optimizer)
    assert noise == pytest.approx(noise_bound(plan.linear, 300))
    assert [line.split("=")[0] for line in plan.reasons] == [
        *("privacy.user.clip.norm", "server.learning_rate", "experiment")
    ]
    assert plan.clip.norm == pytest.approx(0.5 * plan.linear.row_norm)


def test_the_step_is_not_so_long_that_it_swings(folder: Path) -> None:
    plan = plan_of(folder, "privacy.user.noise_multiplier=0.001", "training.learning_rate=5")
    assert plan.linear is not None
    assert plan.settings.server.learning_rate == pytest.approx(
        1.5 / (2.5 * plan.linear.row_norm**2)
    )


def test_what_is_given_is_kept(folder: Path) -> None:
    given = plan_of(folder, "privacy.user.clip.norm=0.3")
    assert (given.clip.norm, given.settings.server.learning_rate, given.reasons) == (0.3, None, ())
    half = plan_of(folder, "server.learning_rate=0.25")
    assert half.settings.server.learning_rate == 0.25
    assert [line.split("=")[0] for line in half.reasons] == ["privacy.user.clip.norm"]


def test_another_model_must_be_given_a_clip_norm(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.user\.clip\.norm must be given"):
        plan_of(folder, "model.name=mlp")
    assert plan_of(folder, "model.name=mlp", "privacy.user.clip.norm=0.5").clip.norm == 0.5


def test_the_rule_does_not_read_the_rows(folder: Path, tmp_path: Path) -> None:
    other = make_project(tmp_path, people=60)
    ours, theirs = (plan_of(each, "data.partition=iid", clients=60) for each in (folder, other))
    assert (ours.clip, ours.settings.server) == (theirs.clip, theirs.settings.server)


def test_a_verdict_speaks_of_the_model(folder: Path) -> None:
    assert "noise will drive" in noise_outlook(plan_of(folder, "server.learning_rate=1")).verdict
    assert noise_outlook(plan_of(folder)).verdict == "it can learn"
    little = plan_of(folder, "privacy.user.target_epsilon=0.01")
    assert "it learns little" in noise_outlook(little).verdict
    said = str(noise_outlook(plan_of(folder)))
    assert re.search(r"logit by 0\.9 \(.* 0\.5 becomes 0\.29", said)


@pytest.mark.parametrize(("model", "zeros"), [("linear", True), ("mlp", False)])
def test_a_linear_model_alone_starts_from_zeros(
    model: str, zeros: bool, folder: Path, tmp_path: Path
) -> None:
    off = ["privacy.user.enabled=false", "privacy.user.target_epsilon=null"]
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=300", *off]
    settings = load_config([*words, f"model.name={model}", "seed=40127"])
    with ExitStack() as held:
        session = prepare(settings, Call(str(tmp_path / "run")), simulated=True, held=held)
        assert bool((session.context.state.params == 0).all()) == zeros
