"""A linear model of a table is the sum of its shapes, each with a band of what noise alone moves."""

from __future__ import annotations

import csv
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from discreet.data.description import DataDescription, description_of
from discreet.data.encoding import column_names, encoded_columns
from discreet.data.targets import CLASS, LABELS, NUMBERS, Target
from discreet.reporting.interpret_form import interpret_form
from discreet.reporting.shape_pictures import shape_pictures
from discreet.run_files.compose import load_asked
from discreet.run_files.shapes import LinearWeights, check_shapes, shape_rows, shapes_of
from discreet.simulation.in_process import simulate
from tests.command import export, report
from tests.tables.made_tables import make_project

DESCRIBED = {
    "format": "csv",
    "file": "a.csv",
    "target": "out",
    "classes": ["no", "yes"],
    "columns": {
        "age": {"kind": "number", "low": 0, "high": 90, "curves": 3, "missing": "middle"},
        "crp": {"kind": "number", "low": 0, "high": 900, "points": [0, 2, 7, 900]},
        "dose": {"kind": "number", "low": 0, "high": 9, "bins": [2, 5]},
        "day": {"kind": "date", "low": "2022-01-01", "high": "2022-12-31", "format": "%d.%m.%Y"},
        "sex": {"kind": "category", "levels": ["F", "M"], "missing": "category"},
    },
    "pairs": [["age", "sex"], ["dose", "crp"]],
}


def described() -> DataDescription:
    return description_of(DESCRIBED)


def made(outputs: int, target: Target = CLASS, seed: int = 40127) -> LinearWeights:
    description = described()
    width = len(column_names(description.columns, description.pairs))
    draws = np.random.default_rng(seed)
    weight, bias = draws.standard_normal((outputs, width)), draws.standard_normal(outputs)
    return LinearWeights(weight, bias, 0.1, target, ("no", "yes", "maybe")[:outputs])


def place_of(shape: dict[str, Any], cells: dict[str, Any]) -> float:
    wanted = [cells[name] for name in shape["columns"]]
    return float(shape["effect"][shape["places"].index(wanted)])


@pytest.mark.parametrize("outputs", [2, 3])
def test_the_model_is_its_intercept_and_the_sum_of_its_shapes(outputs: int) -> None:
    description, model = described(), made(outputs)
    found = shapes_of(model, description)
    # the ends of the ranges, which every grid has
    cells = {"age": 0.0, "crp": 900.0, "dose": "2 to 5", "day": "2022-12-31", "sex": "M"}
    table = cells | {"dose": 4, "day": "31.12.2022"}
    row = encoded_columns(
        {name: [cell] for name, cell in table.items()}, description.columns, description.pairs
    )[0]
    outputs_of = model.weight @ row + model.bias
    expected = [outputs_of[1] - outputs_of[0]] if outputs == 2 else outputs_of - outputs_of.mean()
    for (name, intercept), value in zip(found["intercepts"].items(), expected, strict=True):
        parts = [place_of(each, cells) for each in found["shapes"] if each["target"] == name]
        assert len(parts) == 7
        assert intercept + sum(parts) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(
    ("low", "high"), [(1_000_000, 1_000_001), (20240101, 20241231), (1e9, 1e9 + 2), (1 / 3, 0.34)]
)
def test_a_range_that_is_narrow_beside_its_size_keeps_all_places_and_their_numbers(
    low: float, high: float
) -> None:
    facts = {"kind": "number", "low": low, "high": high, "curves": 2}
    two = {"a": facts, "b": facts}
    description = description_of(DESCRIBED | {"columns": two, "pairs": [["a", "b"]]})
    draws = np.random.default_rng(40127)
    weights = draws.standard_normal((2, 7))
    model = LinearWeights(weights, np.zeros(2), 0.1, CLASS, ("no", "yes"))
    found = shapes_of(model, description)
    check_shapes(json.loads(json.dumps(found)))
    curve, _, pair = found["shapes"]
    places = np.array([labels[0] for labels in curve["places"]])
    assert places == pytest.approx(np.linspace(low, high, 41), rel=0, abs=(high - low) / 1000)
    assert low <= places.min() <= places.max() <= high
    positions = np.linspace(-1, 1, 41)
    bends = encoded_columns({"a": places.tolist()}, description.columns[:1])
    assert bends[:, 0] / bends[-1, 0] == pytest.approx(positions, abs=0.01)
    effect = bends @ (weights[1] - weights[0])[:3]
    assert curve["effect"] == pytest.approx(effect - effect.mean(), abs=0.01)
    assert len(pair["places"]) == 81


def test_the_fields_of_a_map_of_narrow_ranges_have_texts_that_differ() -> None:
    numbers = [1_000_000 + step / 8 for step in range(9)]
    shape = {"target": "y", "columns": ["a", "b"], "kind": "map", "noise": None}
    shape |= {"places": [[*each] for each in product(numbers, [1, 2])], "effect": [0.5] * 18}
    (drawn,) = shape_pictures({"intercepts": {"y": 0.0}, "shapes": [shape]})
    texts = re.findall(r">(1\d{6}[.\d]*)</text", drawn.svg)
    assert [float(text) for text in texts] == pytest.approx(numbers, rel=0, abs=0.06)
    assert len({*texts}) == 9


def test_groups_between_cuts_that_are_close_have_labels_that_differ() -> None:
    cuts = [1_000_000.25, 1_000_000.5, 1_000_000.75]
    columns = {"a": {"kind": "number", "low": 1_000_000, "high": 1_000_001, "bins": cuts}}
    weights = np.array([[0.0] * 4, [1.0, 2.0, 3.0, 6.0]])
    model = LinearWeights(weights, np.zeros(2), 0.1, CLASS, ("no", "yes"))
    found = shapes_of(model, description_of(DESCRIBED | {"columns": columns, "pairs": []}))
    check_shapes(found)
    (shape,) = found["shapes"]
    assert [label for (label,) in shape["places"]] == [
        *("below 1000000.25", "1000000.25 to 1000000.5"),
        *("1000000.5 to 1000000.75", "from 1000000.75"),
    ]
    assert shape["effect"] == [-2, -1, 0, 3]


def test_a_numbers_shapes_are_in_its_own_units() -> None:
    found = shapes_of(made(1, Target(NUMBERS, ("days",), (0.0,), (40.0,))), described())
    plain = shapes_of(made(1, Target(LABELS, ("worse",))), described())
    ours, theirs = (np.array(each["shapes"][0]["effect"]) for each in (found, plain))
    assert list(found["intercepts"]) == ["days"]
    assert ours == pytest.approx(20 * theirs, abs=1e-4)


def test_a_sites_own_names_and_units_do_not_move_a_shape() -> None:
    columns = DESCRIBED["columns"]
    assert isinstance(columns, dict)
    own = {"dose": {"named": "Dosis", "factor": 0.1}, "sex": {"named": "G", "words": {"W": "F"}}}
    there = {name: facts | own.get(name, {}) for name, facts in columns.items()}
    model = made(2)
    found = shapes_of(model, description_of(DESCRIBED | {"columns": there}))
    assert found == shapes_of(model, described())


def test_the_band_holds_95_of_100_draws_of_noise() -> None:
    description, model = described(), made(2)
    assert model.stddev is not None
    found = shapes_of(model, description)["shapes"]
    draws = np.random.default_rng(40127)
    inside = []
    for _ in range(1000):
        noise = draws.standard_normal(model.weight.shape) * model.stddev
        other = LinearWeights(model.weight + noise, model.bias, 0.1, CLASS, model.classes)
        for ours, theirs in zip(found, shapes_of(other, description)["shapes"], strict=True):
            moved = np.abs(np.array(ours["effect"]) - np.array(theirs["effect"]))
            inside.append(float((moved <= np.array(ours["noise"])).mean()))
    # 95 % for each place; the seed fixes the draws
    assert np.mean(inside) == pytest.approx(0.95, abs=0.005)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_project(tmp_path_factory.mktemp("table"), people=60)
    words = [f"data.path={folder}", "rounds=2", "seed=40127"]
    words_of = {"table": ["data.num_clients=60"], "hospitals": []}
    for name, more in words_of.items():
        simulate(*load_asked([f"experiment={name}", *words, *more, f"output_dir={folder / name}"]))
    return folder


@pytest.mark.usefixtures("no_program")
@pytest.mark.parametrize("name", ["table", "hospitals"])
def test_report_card_and_csv_have_the_shapes_and_the_band_where_it_is_known(
    name: str, project: Path
) -> None:
    run, out = project / name, project / f"{name}-out"
    assert report([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Shape of hba1c" in page
    assert "Shape of age and sex" in page
    assert ("95 % of runs that differ in their noise alone" in page) == (name == "table")
    assert export([str(run), str(out)]) == 0
    card = (out / "README.md").read_text()
    assert "| log odds of yes | age and sex |" in card
    rows = list(csv.DictReader((out / "shapes.csv").read_text().splitlines()))
    assert {row["column"] for row in rows} == {
        *("intercept", "age", "sex", "ward", "hba1c", "visit_date")
    }
    assert all(bool(row["noise"]) == (name == "table") for row in rows[1:])
    assert len(list((out / "shapes").glob("*.svg"))) == 6


def test_the_form_of_interpret_has_an_edge_more_than_scores(project: Path) -> None:
    found = json.loads((project / "table" / "shapes.json").read_text())
    form = interpret_form(found)
    kinds = dict(zip(form["feature_names"], form["feature_types"], strict=True))
    assert kinds["hba1c"] == "continuous"
    assert kinds["ward"] == "nominal"
    for kind, each in zip(form["feature_types"], form["internal_obj"]["specific"], strict=True):
        assert len(each["names"]) - len(each["scores"]) == (kind == "continuous")
    assert len(list(shape_rows(found))) > 100
