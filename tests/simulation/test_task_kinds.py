"""Labels and numbers are learned, also from tables of one's own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from discreet.data.datasets import load_task
from discreet.data.targets import FolderError
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.command import predict

SMALL = (
    *("rounds=2", "data.num_clients=20", "training.epochs=1", "model.name=linear", "seed=40127"),
    "operations.predictions=true",
)


def run(folder: Path, *words: str) -> list[dict[str, float | None]]:
    simulate(load_config([*SMALL, *words, f"output_dir={folder}"]))
    return RunFolder(folder).read_metrics()


def test_a_step_with_laplace_noise_learns_numbers_too(tmp_path: Path) -> None:
    words = ("data.name=diabetes", *PLAIN[:2], "privacy.local.kind=laplace_step", "privacy.local.epsilon=8")
    assert {*run(tmp_path / "run", *words)[-1]} >= {"loss", "r2", "mae"}


def table(folder: Path, description: str, *, seed: int, rows: int = 120) -> Path:
    """A folder with `size` and `age`, from which price, rent and two labels follow."""
    draw = np.random.default_rng(seed)
    for name, count in (("train.csv", rows), ("test.csv", 40)):
        size, age = draw.uniform(20, 120, count), draw.uniform(0, 50, count)
        price = 3 * size - 2 * age + draw.normal(0, 5, count)
        columns = {"size": size, "age": age, "price": price, "rent": price / 10, "large": size > 70, "old": age > 25}
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(column.astype(float) for column in columns.values()), strict=True))
    inputs = 'format = "csv"\nfile = "train.csv"\ntest = "test.csv"\ninputs = ["size", "age"]\n'
    (folder / "data.toml").write_text(f"{inputs}low = [20, 0]\nhigh = [120, 50]\n{description}")
    return folder


PRICE = 'target = "price"\ntarget_low = -100\ntarget_high = 400\n'
PLAIN = (
    *("privacy.user.enabled=false", "privacy.user.target_epsilon=null", "sampling.kind=everyone"),
    *("training.epochs=10", "server.momentum=0"),
)


def test_a_column_of_numbers_with_a_public_range_is_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = table(tmp_path, PRICE, seed=11), tmp_path / "run"
    rows = run(out, "data.name=folder", f"data.path={folder}", *PLAIN, "rounds=5")
    assert (rows[-1]["r2"] or 0) > 0.9
    assert predict([str(out), "--data", str(folder / "test.csv"), "--out", str(tmp_path / "said.csv")]) == 0
    assert f"r2 {rows[-1]['r2']:.4f}  mae {rows[-1]['mae']:.4f}" in capsys.readouterr().out
    with (tmp_path / "said.csv").open() as file, (folder / "test.csv").open() as truth:
        for said, true in zip(csv.DictReader(file), csv.DictReader(truth), strict=True):
            assert float(said["target_price"]) == pytest.approx(float(true["price"]), rel=1e-4)
            assert abs(float(said["prediction_price"]) - float(true["price"])) < 100


def test_several_columns_are_labels_or_numbers(tmp_path: Path) -> None:
    several = {
        "labels": 'targets = ["large", "old"]\n',
        "numbers": 'targets = ["price", "rent"]\ntarget_low = [-100, -10]\n',
    }
    several["numbers"] += "target_high = [400, 40]\n"
    for kind, description in several.items():
        (tmp_path / kind).mkdir()
        folder, out = table(tmp_path / kind, description, seed=12), tmp_path / kind / "run"
        rows = run(out, "data.name=folder", f"data.path={folder}", *PLAIN)
        assert load_task("folder", path=str(folder)).shape.target.kind == kind
        found = json.loads((out / "indicators.json").read_text())["test"]
        names = {"labels": ("accuracy", "auc"), "numbers": ("r2",)}[kind]
        assert [found[name] for name in names] == pytest.approx([rows[-1][name] for name in names])


WRONG = (
    ('target = "price"\n', "or of a number target_low and target_high"),
    ('target = "price"\ntarget_low = 0\n', "target_low and target_high must be given together"),
    ('target = "price"\ntarget_low = 3\ntarget_high = 2\n', "target_high must be above target_low"),
    ('target = "price"\ntargets = ["rent"]\n', "target or targets must be given, and not both"),
    ("", "target or targets must be given, and not both"),
    ('targets = ["large", "old"]\nnum_classes = 2\n', "go with neither targets nor a range"),
    ('targets = ["price", "rent"]\n', "line 2: price is not 0 or 1"),
    ('targets = ["price", "rent"]\ntarget_low = [0, 0, 0]\ntarget_high = 1\n', "must be one number or 2 of them"),
    ('targets = ["large", "gone"]\n', "has no column or array large or gone"),
)


def test_what_is_wrong_with_targets_is_said_in_one_line(tmp_path: Path) -> None:
    for description, said in WRONG:
        with pytest.raises(FolderError, match=said) as error:
            load_task("folder", path=str(table(tmp_path, description, seed=13)))
        assert "\n" not in str(error.value)


def test_a_partition_by_classes_of_data_without_classes_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition: dirichlet goes by classes, and these data have none"):
        run(tmp_path / "run", "data.name=diabetes", "data.partition=dirichlet")
    assert not (tmp_path / "run").exists()
