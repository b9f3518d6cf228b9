"""Predictions from a saved model: for files, for named data sets, and what is said of files that do
not fit."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_breast_cancer

from discreet.data.datasets import load_task
from discreet.run_files.compose import load_asked
from discreet.run_files.predictions import (
    MODEL_FILE,
    load_model,
    predict,
    read_inputs,
    write_predictions,
)
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.command import predict as main

RAW, LABELS = load_breast_cancer(return_X_y=True)
NAMES = [str(name) for name in load_breast_cancer().feature_names]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    words = [
        "rounds=2",
        "seed=3187",
        "privacy.user.enabled=false",
        "privacy.user.target_epsilon=null",
    ]
    words += ["data.name=breast_cancer", "data.num_clients=4", "model.name=logistic_regression"]
    simulate(*load_asked([*words, f"output_dir={folder}"]))
    return folder


def write_csv(path: Path, header: list[str], rows: list[list[object]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def raw_rows(count: int) -> list[list[object]]:
    return [list(row) for row in RAW[:count]]


def test_predictions_are_those_of_the_saved_parameters(run: Path) -> None:
    saved, test = load_model(run), load_task("breast_cancer").test
    weight, bias = saved.model.state_dict().values()
    logits = test.inputs.numpy().astype(np.float64) @ weight.numpy().T + bias.numpy()
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert predict(saved, test.inputs).numpy() == pytest.approx(expected, abs=1e-6)


def test_the_test_set_of_the_run_is_predicted_without_a_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    rows = list(csv.DictReader((run / "predictions.csv").read_text().splitlines()))
    test = load_task("breast_cancer").test
    assert [int(row["target"]) for row in rows] == test.targets.tolist()
    right = sum(row["target"] == row["prediction"] for row in rows) / len(rows)
    said = capsys.readouterr().out
    assert f"accuracy {right:.4f}" in said
    assert "precision, recall and f1 are of the class 1," in said
    by_command = (run / "predictions.csv").read_text()
    write_predictions(run)
    assert (run / "predictions.csv").read_text() == by_command
    facts = json.loads((run / "indicators.json").read_text())["test"]
    assert facts["precision_recall_f1_of"] == "1"
    found = [row for row in rows if row["prediction"] == "1"]
    precise = sum(row["target"] == "1" for row in found) / len(found)
    assert facts["precision"] == pytest.approx(precise)


def test_rows_without_a_target_are_predicted_and_nothing_is_rated(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[*row, target] for row, target in zip(raw_rows(3), (1, "", 0), strict=True)]
    data = write_csv(tmp_path / "new.csv", [*NAMES, "target"], rows)
    assert main([str(run), "--data", str(data), "--out", str(tmp_path / "out.csv")]) == 0
    head, *said = csv.reader((tmp_path / "out.csv").read_text().splitlines())
    assert (head[1], len(said)) == ("prediction", 3)
    assert "accuracy" not in capsys.readouterr().out
    assert "1 of 3 rows have no target" in caplog.text


def test_out_names_the_file_columns_are_read_by_name_and_targets_are_optional(
    run: Path, tmp_path: Path
) -> None:
    straight = read_inputs(write_csv(tmp_path / "a.csv", NAMES, raw_rows(3)), load_model(run))[0]
    expected = predict(load_model(run), straight)[:, 1].tolist()
    for rows in (raw_rows(3), []):
        data = write_csv(tmp_path / "new.csv", NAMES[::-1], [row[::-1] for row in rows])
        assert main([str(run), "--data", str(data), "--out", str(tmp_path / "out.csv")]) == 0
        head, *said = csv.reader((tmp_path / "out.csv").read_text().splitlines())
        assert head == ["row", "prediction", "probability_0", "probability_1"]
        assert [row[0] for row in said] == [str(number) for number in range(len(rows))]
        assert [float(row[3]) for row in said] == pytest.approx(expected[: len(rows)], abs=1e-5)


ROW = raw_rows(1)[0]
TABLES = [
    (NAMES[1:], ROW[1:], "bad.csv has no column or array mean radius"),
    (NAMES, ["", *ROW[1:]], "line 2: mean radius is empty: fill it with a public constant"),
    (NAMES, ROW[1:], "line 2: 29 columns, but the header has 30"),
    ([*NAMES, "target"], [*ROW, 2], "line 2: the class is not one of 0 to 1"),
]
ARRAYS = [
    ({"x": RAW[:2]}, "has no column or array inputs"),
    ({"inputs": np.where(RAW[:2] > 100, np.nan, RAW[:2])}, "row 0: an input is missing"),
    ({"inputs": np.array([{"a": 1}], dtype=object)}, "can't be read: Object arrays"),
]


def test_what_is_wrong_with_a_file_is_said_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(name: str) -> str:
        assert main([str(run), "--data", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    for header, row, message in TABLES:
        write_csv(tmp_path / "bad.csv", header, [row])
        assert message in refused("bad.csv")
    for arrays, message in ARRAYS:
        np.savez(tmp_path / "bad.npz", **arrays)
        assert message in refused("bad.npz")
    for name, content in (("a.npz", b"no archive"), ("a.csv", b"\xff\xfe\x00"), ("a.txt", b"")):
        (tmp_path / name).write_bytes(content)
        refused(name)


def test_a_table_without_rows_is_named_though_it_is_no_mistake(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_csv(tmp_path / "none.csv", NAMES, [])
    assert main([str(run), "--data", str(data), "--out", str(tmp_path / "out.csv")]) == 0
    assert "none.csv has no rows to predict" in capsys.readouterr().err


def test_a_column_that_tells_rows_apart_is_copied_as_text_that_no_spreadsheet_runs(
    run: Path, tmp_path: Path
) -> None:
    data = write_csv(tmp_path / "named.csv", ["@who", *NAMES], [["=HYPERLINK(1)", *raw_rows(1)[0]]])
    assert (
        main([str(run), "--data", str(data), "--id", "@who", "--out", str(tmp_path / "out.csv")])
        == 0
    )
    (row,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert (row["row"], row["'@who"]) == ("0", "'=HYPERLINK(1)")


def test_out_replaces_earlier_predictions_and_no_other_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_csv(tmp_path / "new.csv", NAMES, raw_rows(3))
    (tmp_path / "link.csv").symlink_to(data)
    kept = [data, tmp_path / "link.csv", run / "metrics.csv", run / "model.safetensors"]
    before = [path.read_bytes() for path in kept]
    for path in (*kept, tmp_path):
        assert main([str(run), "--data", str(data), "--out", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    assert [path.read_bytes() for path in kept] == before
    assert (tmp_path / "link.csv").is_symlink()

    out = tmp_path / "out.csv"
    for more in ([], ["--id", NAMES[0]], []):
        assert main([str(run), "--data", str(data), "--out", str(out), *more]) == 0
    with out.open("a") as file:
        file.write("3,1,0.5,0.5\n")
    assert main([str(run), "--data", str(out), "--out", str(out)]) == 2
    assert "--data" in capsys.readouterr().err


def test_a_model_file_that_lacks_a_fact_is_refused_with_its_name(run: Path, tmp_path: Path) -> None:
    with safe_open(run / MODEL_FILE, framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(run / MODEL_FILE)
    for name in ("data", "model", "input_shape"):
        fewer = {known: value for known, value in facts.items() if known != name}
        save_file(tensors, tmp_path / MODEL_FILE, metadata=fewer)
        with pytest.raises(ConfigError, match=rf"{MODEL_FILE} can't be read: '{name}'"):
            load_model(tmp_path)
