"""Shapes that must rise: the projection of a trained linear model, and what cannot rise."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.isotonic import isotonic_regression
from torch import nn

from discreet.data.description import description_of
from discreet.data.encoding import encoded_columns
from discreet.data.examples import Examples, Task, TaskShape
from discreet.data.targets import CLASS, NUMBERS, Array, Target
from discreet.models.models import flatten_parameters, load_parameters
from discreet.reporting.records import read_runs
from discreet.run_files.compose import load_asked
from discreet.run_files.predictions import load_model, predict
from discreet.run_files.shapes import LinearWeights, shapes_of
from discreet.server.resolve import resolve
from discreet.server.rising import project, projected, rising_shapes
from discreet.settings.data import NormaliserConfig
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.command import export, report
from tests.tables.made_tables import TOML, make_project

DOSE = {"kind": "number", "low": 0, "high": 8, "curves": 3, "missing": "middle", "rises": True}
FACTS = {
    "format": "csv",
    "file": "a.csv",
    "target": "out",
    "classes": ["no", "yes"],
    "columns": {
        "sex": ["F", "M"],
        "dose": DOSE,
        "group": {"kind": "number", "low": 0, "high": 9, "bins": [2, 5, 7], "falls": True},
        "day": {"kind": "date", "low": "2022-01-01", "high": "2022-01-04", "curves": 9}
        | {"rises": True},
    },
}


def facts_with(column: str, **more: Any) -> dict[str, Any]:
    columns = FACTS["columns"]
    assert isinstance(columns, dict)
    return FACTS | {"columns": columns | {column: {"kind": "number", "low": 0, "high": 8, **more}}}


def task_of(target: Target, classes: int) -> Task:
    description = description_of(FACTS)
    width = sum(len(column.outputs) for column in description.columns)
    targets = torch.zeros(1, dtype=torch.int64) if classes else torch.zeros(1, 2)
    rows = Examples(torch.zeros(1, width), targets)
    return Task("a", rows, rows, TaskShape((width,), classes, target=target), description)


def model_of(width: int, outputs: int, seed: int = 40127) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(width, outputs))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def task_of_one(facts: dict[str, Any]) -> Task:
    """A table of one number, which must rise."""
    column = {"kind": "number", "rises": True} | facts
    description = description_of(FACTS | {"columns": {"a": column}})
    width = len(description.columns[0].outputs)
    rows = Examples(torch.zeros(1, width), torch.zeros(1, dtype=torch.int64))
    return Task("a", rows, rows, TaskShape((width,), 2, target=CLASS), description)


def with_ones(task: Task, cells: Array) -> Array:
    assert task.description is not None
    encoded = encoded_columns({"a": cells.tolist()}, task.description.columns)
    return np.column_stack([encoded, np.ones(len(cells))])


def log_odds(model: nn.Module) -> Array:
    (layer,) = (each for each in model.modules() if isinstance(each, nn.Linear))
    found = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().numpy()
    return np.asarray(found[1] - found[0])


def test_the_projection_is_the_nearest_shape_that_rises_by_another_solver() -> None:
    places = np.linspace(0, 1, 60)
    angles = np.arccos(places * 2 - 1)
    encoded = np.stack([np.cos(degree * angles) / degree for degree in (1, 2, 3, 4)], axis=1)
    for seed in range(5):
        weights = np.random.default_rng(seed + 40127).standard_normal(4)
        found = projected(encoded, weights, 1)
        other = minimize(
            lambda own, given=weights: float(((encoded @ (own - given)) ** 2).sum()),
            np.array([1.0, 0, 0, 0]),
            jac=lambda own, given=weights: 2 * encoded.T @ encoded @ (own - given),
            constraints={"type": "ineq", "fun": lambda own: np.diff(encoded @ own)},
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-12},
        )
        assert np.diff(encoded @ found).min() > -1e-9
        assert encoded @ found == pytest.approx(encoded @ other.x, abs=1e-4)


def test_groups_become_isotonic_regression_and_a_shape_that_rises_stays() -> None:
    given = np.array([1.0, 3.0, 2.0, -1.0, 5.0])
    wanted = isotonic_regression(given)
    assert projected(np.eye(5), given, 1) == pytest.approx(wanted, abs=1e-9)
    assert projected(np.eye(5), -given, -1) == pytest.approx(-wanted, abs=1e-9)
    assert (projected(np.eye(5), wanted, 1) == wanted).all()


@pytest.mark.parametrize("curves", [3, 9, 20])
@pytest.mark.parametrize(
    ("low", "high", "points"),
    [
        (0, 100, None),
        (0, 100, [0, 1, 2, 100]),
        (1_000_000, 1_000_001, None),
        (20240101, 20241231, None),
        (1e9, 1e9 + 2, None),
    ],
)
def test_a_curve_rises_between_the_places_too(
    low: float, high: float, points: list[float] | None, curves: int
) -> None:
    facts = {"low": low, "high": high, "curves": curves} | ({"points": points} if points else {})
    task = task_of_one(facts)
    ends = (1 - np.cos(np.linspace(0, np.pi, 20_001))) / 2
    cells = low + (high - low) * np.concatenate([ends, np.linspace(0, 1, 20_001)])
    encoded = with_ones(task, np.unique(cells.clip(low, high)))
    for seed in range(20):
        model = model_of(curves + 1, 2, seed + 40127).double()
        project(model, task, NormaliserConfig())
        shape = encoded @ log_odds(model)
        fall = (np.maximum.accumulate(shape) - shape).max()
        # at most (20 + 1) ** 2 * (pi / 2000) ** 2 / 16 by Bernstein's inequality
        assert fall <= 7e-5 * np.ptp(shape) + 1e-9


def test_every_part_of_the_range_counts_as_much_as_its_length() -> None:
    task = task_of_one({"low": 0, "high": 100, "curves": 5})
    encoded = with_ones(task, np.linspace(0, 100, 2001))
    for seed in range(6):
        model = model_of(6, 2, seed + 40127).double()
        before = log_odds(model)
        project(model, task, NormaliserConfig())
        nearest = encoded @ projected(encoded, before, 1)
        shape = encoded @ log_odds(model)
        assert np.abs(shape - nearest).max() <= 0.005 * np.ptp(encoded @ before)
        assert shape.mean() == pytest.approx((encoded @ before).mean(), abs=1e-3)


@pytest.mark.parametrize(
    ("target", "classes"), [(CLASS, 2), (Target(NUMBERS, ("a", "b"), (0.0,) * 2, (9.0,) * 2), 0)]
)
@pytest.mark.parametrize("scaled", [False, True])
def test_every_output_rises_and_other_columns_stay(
    target: Target, classes: int, scaled: bool
) -> None:
    task = task_of(target, classes)
    width = task.shape.input_shape[0]
    draws = np.random.default_rng(40127)
    by = NormaliserConfig()
    if scaled:
        by = NormaliserConfig(
            draws.normal(size=width).tolist(), draws.uniform(1, 3, width).tolist()
        )
    model = model_of(width, 2)
    description = task.description
    assert description is not None

    def shapes() -> dict[str, Any]:
        with torch.no_grad():
            corners = torch.cat([torch.zeros(1, width), torch.eye(width)])
            if by.means is not None and by.deviations is not None:
                corners = (corners - torch.tensor(by.means)) / torch.tensor(by.deviations)
            outputs = model(corners).double().numpy()
        weight = (outputs[1:] - outputs[0]).T
        return shapes_of(LinearWeights(weight, outputs[0], 0.1, target), description)

    before = shapes()
    project(model, task, by)
    after = shapes()
    for old, new in zip(before["shapes"], after["shapes"], strict=True):
        effect, given = np.array(new["effect"]), np.array(old["effect"])
        ordinary = [each != ["empty"] for each in new["places"]]
        way = {"group": -1, "sex": 0}.get(new["columns"][0], 1)
        assert (way * np.diff(effect[ordinary]) > -1e-5).all()
        fine = (way * np.diff(given[ordinary]) >= 0).all()
        assert (np.abs(effect - given).max() < 1e-5) == fine
    assert list(after["intercepts"].values()) == pytest.approx(
        list(before["intercepts"].values()), abs=0.2
    )


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (facts_with("dose", rises=True, falls=True), "not both true"),
        (facts_with("dose", rises="yes"), "true or false"),
        (facts_with("dose", rises=True) | {"classes": ["a", "b", "c"]}, "more than two classes"),
        (facts_with("dose", rises=True) | {"pairs": [["dose", "sex"]]}, "it is in a pair"),
    ],
)
def test_what_cannot_rise_is_refused(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        description_of(facts)


@pytest.fixture(scope="module")
def project_of_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("table"), people=60)
    # The truth rises, so that a shape that must fall is certain to be moved.
    words = 'missing = "middle", curves = 3'
    (folder / "data.toml").write_text(TOML.replace(words, f"{words}, falls = true"))
    return folder


@pytest.mark.usefixtures("no_program")
def test_the_model_that_leaves_falls_and_report_and_card_say_so(project_of_table: Path) -> None:
    folder = project_of_table
    run, out = folder / "run", folder / "out"
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=60", "rounds=3"]
    simulate(*load_asked([*words, "seed=40127", "privacy.user.enabled=false", f"output_dir={run}"]))
    (record,) = read_runs([run])
    left = json.loads((run / "score_intervals.json").read_text())
    assert record.of_model("loss") == left["loss"][0] != record.rounds[-1]["loss"]
    assert report([str(run)]) == 0
    assert "hba1c was made to fall after training" in (run / "report.html").read_text()
    assert export([str(run), str(out)]) == 0
    assert "hba1c was made to fall after training" in (out / "README.md").read_text()
    rows = csv.DictReader((out / "shapes.csv").read_text().splitlines())
    effects = [
        float(row["effect"]) for row in rows if row["column"] == "hba1c" and row["place"] != "empty"
    ]
    assert max(np.diff(effects)) < 1e-5
    shapes = json.loads((run / "shapes.json").read_text())["shapes"]
    (shape,) = (each for each in shapes if each["columns"] == ["hba1c"])
    assert shape["moved"] > 0
    saved = load_model(run)
    assert saved.description is not None
    cells = {"age": 50, "sex": "F", "ward": "surgery", "visit_date": "01.02.2023"}
    values = np.linspace(3, 14, 100).tolist()
    table = {name: [cell] * 100 for name, cell in cells.items()} | {"hba1c": values}
    inputs = encoded_columns(table, saved.description.columns, saved.description.pairs)
    said = predict(saved, torch.from_numpy(inputs).float())[:, 1]
    assert float(said.diff().max()) < 1e-6


@pytest.mark.parametrize(
    "words", [["experiment=table_once"], ["experiment=table", "model.name=mlp"]]
)
def test_another_model_than_a_linear_one_is_refused(
    words: list[str], project_of_table: Path, tmp_path: Path
) -> None:
    given = [*words, f"data.path={project_of_table}", "data.num_clients=60", "seed=40127"]
    with pytest.raises(ConfigError, match="can rise or fall only"):
        simulate(
            *load_asked([*given, "privacy.user.clip.norm=1", f"output_dir={tmp_path / 'run'}"])
        )


def test_a_model_that_diverged_is_left_as_it_is(tmp_path: Path) -> None:
    folder = make_project(tmp_path, people=20)
    (folder / "data.toml").write_text(TOML.replace("curves = 3", "curves = 3, falls = true"))
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=20", "rounds=1"]
    plan, task = resolve(load_asked([*words, "seed=40127", f"output_dir={tmp_path / 'run'}"])[0])
    model = model_of(task.shape.input_shape[0], 2)
    load_parameters(model, flatten_parameters(model) * float("nan"))
    found = rising_shapes(task, plan, model, 1)
    assert found is not None
    assert not any("way" in each for each in found["shapes"])
