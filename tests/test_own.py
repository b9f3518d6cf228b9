"""One's own model and data: the example of the guide, run; and what is refused, in one line."""

from __future__ import annotations

import csv
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from discreet.data.datasets import load_task
from discreet.data.targets import FolderError
from discreet.node.account import Refused
from discreet.node.nodes import node_client
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.command import predict
from tests.command import simulate as simulate_main
from tests.node.clients import request
from tests.test_readme import commands

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "examples" / "own"
GUIDE = ROOT / "docs" / "guide" / "models.md"
MODEL = "examples.own.model:build"
QUICK = ("rounds=2", "training.epochs=1", "seed=31013")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def test_the_guide_shows_the_example_as_it_is() -> None:
    shown, there = tomllib.loads(blocks("toml")[0]), tomllib.loads((OWN / "data.toml").read_text())
    assert there == shown | {"model": MODEL}
    (build,) = (block for block in blocks("python") if block.startswith("def build"))
    assert build in (OWN / "model.py").read_text()


def test_the_commands_of_the_guide_train_and_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = [
        [word.replace("outputs/", f"{tmp_path}/") for word in words]
        for words in commands(GUIDE)
        if "examples/own" in " ".join(words)
    ]
    assert [words[1] for words in lines] == ["simulate", "predict"]
    assert simulate_main([*lines[0][2:], "rounds=2", "seed=31013"]) == 0
    assert (RunFolder(tmp_path / "own").read_metrics()[-1]["accuracy"] or 0) > 0.6
    assert predict(lines[1][2:]) == 0
    assert (tmp_path / "own" / "said.csv").read_text().splitlines()[0].startswith("row,target,prediction")


def test_the_clients_are_the_people_of_the_table() -> None:
    task = load_task("folder", path=str(OWN))
    assert task.owners is not None
    assert len(task.owners.unique()) == 300
    assert (task.shape.input_shape, task.shape.num_classes) == ((4,), 3)
    assert float(task.train.inputs.abs().max()) <= 1


def owns(tmp_path: Path, change: Callable[[str], str] = str) -> Path:
    """A copy of the example's data whose description is changed."""
    folder = tmp_path / "mine"
    shutil.copytree(OWN, folder)
    (folder / "data.toml").write_text(change((OWN / "data.toml").read_text()))
    return folder


def without(key: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"(?m)^{key} = .*\n", "", text)


CLASSES = 'classes = ["rest", "walk", "run"]'
WRONG = [
    (lambda text: text.replace(CLASSES, ""), "classes that are words must be listed"),
    (lambda text: text.replace('"activity"', '"label"'), "has no column or array label"),
    (lambda text: text.replace("[200, 2, ", "[2, "), "low and high must be one number, or equally many"),
    (lambda text: text.replace(CLASSES, "num_classes = 1"), "num_classes: Input should be greater than or equal to 2"),
    (lambda text: text + "num_classes = 3\n", "num_classes and classes are both given"),
]


def test_lines_are_counted_over_empty_ones_and_those_within_quotation_marks(tmp_path: Path) -> None:
    folder = owns(tmp_path)
    lines = (folder / "train.csv").read_text().splitlines()
    rows = [lines[0], "", '"zero\nor 0",5,0.1,70,32,rest', "", *lines[2:5], '"Ann Lee",a lot,0.1,70,32,rest']
    (folder / "train.csv").write_text("\n".join(rows))
    with pytest.raises(FolderError, match=r"/train.csv, line 9: the column steps is no finite number$"):
        load_task("folder", path=str(folder))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("Ann Lee,5,0.1,70,32,rest,HIV", "line 8: 7 columns, and the header has 6"),
        ("Ann Lee,HIV,0.1,70,32,rest", "line 8: the column steps is no finite number"),
        ("Ann Lee,5,0.1,70,32,HIV", "line 8: the class is not in classes"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_without_the_row(row: str, said: str, tmp_path: Path) -> None:
    folder = owns(tmp_path)
    lines = (folder / "train.csv").read_text().splitlines()
    (folder / "train.csv").write_text("\n".join([*lines[:7], row, *lines[8:]]))
    with pytest.raises(FolderError) as error:
        load_task("folder", path=str(folder))
    assert str(error.value) == f"{folder.resolve() / 'train.csv'}, {said}"
    assert error.value.__suppress_context__  # a traceback would show the reader's own message


def test_values_outside_the_range_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = owns(tmp_path, lambda text: text.replace("[200, 2, 200, 38]", "[200, 2, 200, 28.5]"))
    with (folder / "train.csv").open(newline="") as file:
        rows = [[float(row[name]) for name in ("steps", "swing", "pulse", "warmth")] for row in csv.DictReader(file)]
    load_task("folder", path=str(folder))
    ranges = ((0, 200), (0, 2), (40, 200), (28, 28.5))
    outside = sum(not low <= value <= high for row in rows for value, (low, high) in zip(row, ranges, strict=True))
    assert f"train.csv: {outside} of {4 * len(rows)} values lie outside low..high" in caplog.text


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(
    tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    with pytest.raises(FolderError, match=message) as error:
        load_task("folder", path=str(owns(tmp_path, change)))
    assert "\n" not in str(error.value)


def test_how_many_classes_occur_is_not_taken_from_the_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros((4, 2)), y=np.array([0, 1, 1, 0]))
    (tmp_path / "data.toml").write_text('format = "npz"\nfile = "a.npz"\ntest = "a.npz"\ntarget = "y"\n')
    with pytest.raises(FolderError, match="must give classes or num_classes: how many occur is not public"):
        load_task("folder", path=str(tmp_path))


# Builders for the tests below, named like any other: tests.test_own:name.


def wide(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Linear(5, num_classes)


class Jitter(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(inputs, 0.5, self.training)


def jitter(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), Jitter(), nn.Linear(8, num_classes))


class Centred(nn.Module):
    """Every output depends on every input of the batch, through their mean."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs - inputs.mean(0)


def centred(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(Centred(), nn.Linear(4, num_classes))


def detached(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    model = nn.Linear(4, num_classes)
    model.register_forward_hook(lambda module, given, outputs: outputs.detach())
    return model


class Observer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.get_buffer("largest"), inputs.detach().amax(0)) + 1
        return inputs


def observed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Observer(), nn.Linear(4, num_classes))


REFUSED = {
    "./tests/test_own.py:wide": r"module as Python imports it, such as tests\.test_own:wide \(got ./t",
    "tests.test_own:detached": "detached has no gradient by its parameters: element 0 of tensors does not require grad",
    "no.such.module:build": "'no.such.module' of no.such.module:build can't be imported: No module named 'no'",
    "tests.test_own:wide": r"can't read inputs of shape \(4,\)",
    "tests.test_own:centred": "mixes the examples of a batch",
    "tests.test_own:observed": "the model's forward changes 1.largest: ",
    "tests.test_own:jitter": "draws random numbers by itself",
    "mpl": "no model 'mpl'; known are logistic_regression, .*, or package.module:function",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_trained_is_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    words = ["data.name=folder", f"data.path={OWN}", f"model.name='{name}'", f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=REFUSED[name]) as error:
        simulate(load_config(words))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_main(["data.name=folder", "data.path=/nowhere"]) == 2
    assert re.fullmatch(r"discreet: /nowhere/data.toml is missing: .*\n", capsys.readouterr().err)


def write_rows(path: Path, head: str, *rows: str) -> Path:
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def test_predictions_find_columns_by_name_and_scale_them_as_in_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["data.name=folder", f"data.path={OWN}", "data.num_clients=50", "model.name=logistic_regression"]
    simulate(load_config([*QUICK, *words, f"output_dir={run}"]))
    one = write_rows(tmp_path / "one.csv", "steps,swing,pulse,warmth", "100,0.5,95,33")
    other = write_rows(tmp_path / "other.csv", "warmth,pulse,swing,steps", "33,95,0.5,100")
    said = []
    for file in (one, other):
        assert predict([str(run), "--data", str(file), "--out", str(tmp_path / "out.csv")]) == 0
        said.append((tmp_path / "out.csv").read_text())
    assert said[0] == said[1]
    named = write_rows(tmp_path / "named.csv", "who,steps,swing,pulse,warmth,activity", "ann,100,0.5,95,33,walk")
    assert predict([str(run), "--data", str(named), "--out", str(tmp_path / "out.csv"), "--id", "who"]) == 0
    (line,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert [*line][:4] == ["row", "who", "target", "prediction"]
    assert [*line][4:] == ["probability_rest", "probability_walk", "probability_run"]
    assert (line["row"], line["who"], line["target"]) == ("0", "ann", "walk")
    assert line["prediction"] == max(("rest", "walk", "run"), key=lambda name: float(line[f"probability_{name}"]))


NODE_RUN = ("privacy.user.enabled=false", "privacy.user.target_epsilon=null", "data.name=folder", "data.num_clients=2")


def test_a_node_trains_the_model_that_its_owner_has_named(tmp_path: Path) -> None:
    run = load_config([*NODE_RUN, f"model.name={MODEL}", "data.path=/the/servers"])
    client = node_client(request(run), {"data": str(owns(tmp_path))})
    assert len(client.examples) == 2400
    assert sum(parameter.numel() for parameter in client.model.parameters()) == 4 * 16 + 16 + 32 + 16 * 3 + 3


@pytest.mark.parametrize("name", ["tests.test_own:wide", "os:abort"])
def test_a_node_imports_nothing_that_its_owner_has_not_named(name: str, tmp_path: Path) -> None:
    run = load_config([*NODE_RUN, f"model.name='{name}'"])
    with pytest.raises(Refused, match="is not the model that this node's"):
        node_client(request(run), {"data": str(owns(tmp_path))})


def test_a_node_without_data_of_its_own_imports_nothing_and_reads_no_folder() -> None:
    node = {"partition-id": 0, "num-partitions": 2}
    digits = load_config([*NODE_RUN, "data.name=digits", "model.name='os:abort'"])
    with pytest.raises(Refused, match="is not the model that this node's"):
        node_client(request(digits), node)
    folder = load_config([*NODE_RUN, f"data.path={OWN}"])
    with pytest.raises(Refused, match="this node has no data"):
        node_client(request(folder), node)
