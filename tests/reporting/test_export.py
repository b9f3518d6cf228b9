"""An exported model: PyTorch and scikit-learn load it without Discreet, and it gives the numbers of
the run."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml

import discreet
from discreet.reporting.model_card import _guarantees, _trained, model_card
from discreet.reporting.records import read_runs
from discreet.run_files.compose import load_asked
from discreet.run_files.model_description import read_facts
from discreet.run_files.predictions import load_model
from discreet.simulation.in_process import simulate
from tests.command import export, predict
from tests.tables.made_tables import make_project

pytestmark = pytest.mark.processes

ALONE = """
import builtins, json, pickle, sys
import pandas
sys.path.insert(0, sys.argv[1])
real = builtins.__import__
def checked(name, *rest, **more):
    assert name.split(".")[0] != "discreet", name
    return real(name, *rest, **more)
builtins.__import__ = checked
from classifier import Classifier
from sklearn.metrics import roc_auc_score
rows = pandas.read_csv(sys.argv[2], sep=";", dtype=str, keep_default_na=False)
model = Classifier()
said = model.predict_proba(rows)
assert (pickle.loads(pickle.dumps(model)).predict_proba(rows) == said).all()
assert model.predict_proba(rows[:0]).shape == (0, said.shape[1])
print(json.dumps([said.tolist(), model.predict(rows).tolist()]))
assert 0 <= roc_auc_score(rows["readmitted"] == "yes", said[:, 1]) <= 1
for wrong in (rows.drop(columns=["age"]), rows["age"], rows.to_numpy(), None):
    try:
        model.predict(wrong)
    except ValueError as error:
        assert "must be a DataFrame or a dictionary of lists; missing: " in str(error)
    else:
        raise AssertionError(wrong)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a messy table and a run of two rounds."""
    folder = make_project(tmp_path_factory.mktemp("table"), people=60)
    words = [
        "experiment=table",
        f"data.path={folder}",
        "data.num_clients=60",
        "rounds=2",
        "seed=40127",
    ]
    simulate(*load_asked([*words, f"output_dir={folder / 'run'}"]))
    return folder


@pytest.fixture(scope="module")
def exported(project: Path) -> Path:
    assert export([str(project / "run"), str(project / "out")]) == 0
    return project / "out"


def test_scikit_learn_gives_the_numbers_of_the_run_without_discreet(
    project: Path, exported: Path
) -> None:
    words = [sys.executable, "-W", "ignore", "-c", ALONE, exported, project / "test.csv"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, classes = json.loads(done.stdout)
    assert predict([str(project / "run"), "--data", str(project / "test.csv")]) == 0
    with (project / "run" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert np.array(said)[:, 1] == pytest.approx(
        [float(row["probability_yes"]) for row in rows], abs=1e-5
    )
    assert classes == [row["prediction"] for row in rows]


def test_no_exported_file_names_a_place_of_this_machine(project: Path, exported: Path) -> None:
    for path in filter(Path.is_file, exported.rglob("*")):
        if path.suffix == ".pyc":  # of whoever has imported the folder
            continue
        content = path.read_bytes()
        for place in (Path(torch.__file__).parent, Path(discreet.__file__).parent, project):
            assert str(place).encode() not in content, path


def test_the_example_has_at_most_fifteen_lines_of_code_and_was_run(exported: Path) -> None:
    code = (exported / "example.py").read_text()
    assert sum(bool(line.strip()) and not line.startswith("#") for line in code.splitlines()) <= 15
    card = (exported / "README.md").read_text()
    assert code in card
    assert "['no' 'yes'] [[0." in card


@pytest.mark.parametrize(
    ("experiment", "line"),
    [
        ("regression", "print(model.predict(rows))"),
        ("multilabel", "print(network(inputs).sigmoid())"),
    ],
)
def test_models_of_numbers_and_of_labels_are_exported_too(
    experiment: str, line: str, tmp_path: Path
) -> None:
    words = (f"experiment={experiment}", "rounds=1", "privacy.user.too_noisy=warn", "seed=40127")
    simulate(*load_asked([*words, f"output_dir={tmp_path / 'run'}"]))
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    code = (tmp_path / "out" / "example.py").read_text()
    assert line in code
    assert code in (tmp_path / "out" / "README.md").read_text()


def test_the_model_card_has_metadata_the_guarantee_and_the_scores(exported: Path) -> None:
    _, head, text = (exported / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(head)
    scores = {each["type"] for each in metadata["model-index"][0]["results"][0]["metrics"]}
    assert {"accuracy", "auc", "loss"} <= scores
    for said in (
        "| user | 8 |",
        "add or remove one client",
        "Not covered:",
        "drawn from a seed",
        "constant guess",
        "after round 2:\n\n| score",
    ):
        assert said in text, said


WHOLE = "a client is one value of the column `patient_id`, with all its rows"
DEALT = {
    "natural": WHOLE,
    "owners": "one value of the column `patient_id` is at one client, with all its rows",
    "iid": "rows of one value of the column `patient_id` may be at several clients: no guarantee here",
}


@pytest.mark.parametrize("partition", DEALT)
def test_the_model_card_says_whom_a_client_is(project: Path, partition: str) -> None:
    (record,) = read_runs([(project / "run").resolve()])
    data = replace(record.config.data, partition=partition)
    facts = read_facts(project / "run")
    dealt = replace(record, config=replace(record.config, data=data))
    card = "\n".join(_trained(dealt, facts))
    assert DEALT[partition] in card
    assert (WHOLE in card) == (partition == "natural")


def test_the_model_card_says_what_does_not_hold_for_all(project: Path) -> None:
    (record,) = read_runs([(project / "run").resolve()])
    seeded, chosen = _guarantees(record), _guarantees(replace(record, selection={}))
    assert "tune" not in "".join(seeded)
    assert "epsilon holds for whoever sees neither their number" in "".join(chosen)
    more = [replace(each, not_covered=(f"gap {each.name}",)) for each in record.guarantees]
    both = [replace(each, enabled=True) for each in more]
    with patch.object(type(record), "guarantees", both):
        text = "".join(_guarantees(record))
    assert "Not covered: gap user; gap example; gap local." in text
    folded = {"description": {"owner": "who", "ids": "folded"}, "parameters": {}, "inputs": []}
    lines = _trained(record, {**folded, "discreet": "0"})
    assert "- a client is one value of the column `who` in all its spellings, with all" in "".join(
        lines
    )


@pytest.mark.parametrize("words", [["seed=40127"], ["privacy.user.noise_multiplier=0"]])
def test_a_run_whose_noise_protects_nobody_is_not_called_private(
    words: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    small = ["data.num_clients=20", "rounds=1", "privacy.user.too_noisy=warn"]
    simulate(*load_asked([*small, *words, f"output_dir={run}"]))
    facts = json.loads((run / "privacy.json").read_text())
    assert facts["protects_nobody"]
    (record,) = read_runs([run])
    card = model_card(record, read_facts(run) or {}, example="", said="")
    assert "trained without a guarantee of privacy" in card
    assert "differential-privacy" not in card
    if words != ["seed=40127"]:
        assert facts["guarantees"][0]["floating_point"] == {"noise": "none", "delta_slack": 0.0}
        assert "| user | none (infinite) |" in card


def test_the_model_card_says_that_clients_rated_the_model_and_how_surely(tmp_path: Path) -> None:
    folder = make_project(tmp_path, people=60)
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=60", "rounds=2"]
    rated = ["evaluation.kind=private", "evaluation.every=1", "evaluation.noise_multiplier=1"]
    simulate(*load_asked([*words, *rated, "seed=40127", f"output_dir={folder / 'run'}"]))
    assert export([str(folder / "run"), str(folder / "out")]) == 0
    card = (folder / "out" / "README.md").read_text()
    assert "test set" not in card
    assert "name: held-out examples of the clients, noised" in card
    assert "clients rated the model on examples that they hold out" in card
    rows = [line for line in card.splitlines() if line.startswith("| accuracy |")]
    assert re.fullmatch(r"\| accuracy \| \d\.\d{4} \| \d\.\d{4} \|", rows[0])


def test_the_description_that_was_saved_holds_and_what_differs_is_named(
    project: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, toml = load_model(project / "run").description, (project / "data.toml").read_text()
    words = [
        str(project / "run"),
        "--data",
        str(project / "test.csv"),
        "--out",
        str(project / "said.csv"),
    ]
    assert predict(words) == 0
    first, _ = (project / "said.csv").read_text(), capsys.readouterr()
    (project / "data.toml").write_text(toml.replace("age = [0, 100]", "age = [0, 50]"))
    assert predict(words) == 0
    assert "differs in columns.age" in capsys.readouterr().err
    (project / "data.toml").unlink()
    (project / "train.csv").rename(project / "away.csv")
    assert predict(words) == 0
    (project / "away.csv").rename(project / "train.csv")
    (project / "data.toml").write_text(toml)
    assert (project / "said.csv").read_text() == first
    assert load_model(project / "run").description == before


def test_a_cell_that_the_model_can_not_read_is_to_be_corrected(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, row, *_ = (project / "test.csv").read_text("utf-8-sig").splitlines()
    cells = row.split(";")
    cells[2] = ""
    (project / "new.csv").write_text("\n".join([header, ";".join(cells)]))
    assert predict([str(project / "run"), "--data", str(project / "new.csv")]) == 2
    said = capsys.readouterr().err
    assert "new.csv, line 2: age is empty" in said
    assert "reads by its model.json" in said


def test_a_description_in_place_of_a_table_is_told_which_files_there_are(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict([str(project / "run"), "--data", str(project / "data.toml")]) == 2
    said = capsys.readouterr().err
    assert said.endswith("a file of inputs must end in .csv, .parquet, .jsonl or .npz\n")


def test_a_folder_that_holds_something_and_a_run_without_description_are_refused(
    project: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(project / "run"), str(exported)]) == 2
    assert "is not empty" in capsys.readouterr().err
    old = tmp_path / "old"
    old.mkdir()
    for name in ("model.safetensors", "config.yaml"):
        (old / name).write_bytes((project / "run" / name).read_bytes())
    assert export([str(old), str(tmp_path / "out")]) == 2
    assert "has no model.json" in capsys.readouterr().err


def test_an_exported_model_reads_cells_as_its_site_writes_them(tmp_path: Path) -> None:
    folder = make_project(tmp_path, people=30)
    toml = (folder / "data.toml").read_text()
    written = 'named = "hba1c", empty = ["k.A."], below = "half", unit = "%", missing = "middle"'
    toml = re.sub(
        "hba1c = .*", f'sugar = {{ kind = "number", low = 3, high = 14, {written} }}', toml
    )
    (folder / "data.toml").write_text(
        toml.replace('decimal = ","', 'decimal = ","\nthousands = "."')
    )
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=30", "rounds=1", "seed=5"]
    simulate(*load_asked([*words, f"output_dir={folder / 'run'}"]))
    assert export([str(folder / "run"), str(folder / "out")]) == 0
    rows = [line.split(";") for line in (folder / "test.csv").read_text("utf-8-sig").splitlines()]
    for row, cell in zip(rows[1:5], ("k.A.", "<6,5 %", "1.000,0", "6,5"), strict=True):
        row[5] = cell
    (folder / "new.csv").write_text("\n".join(";".join(row) for row in rows))
    assert predict([str(folder / "run"), "--data", str(folder / "new.csv")]) == 0
    with (folder / "run" / "predictions.csv").open() as file:
        wanted = [float(row["probability_yes"]) for row in csv.DictReader(file)]
    code = (
        "import json, pandas\nfrom classifier import Classifier\n"
        "rows = pandas.read_csv('../new.csv', sep=';', dtype=str, keep_default_na=False)\n"
        "print(json.dumps(Classifier().predict_proba(rows)[:, 1].tolist()))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder / "out",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(wanted, abs=1e-5)
