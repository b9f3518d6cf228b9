"""One's own model and data: the example of the guide, run; and what is refused, in one line."""

from __future__ import annotations

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
from discreet.node.work import work_of
from discreet.run_files import places
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.command import predict
from tests.command import simulate as simulate_main
from tests.node.clients import received, request
from tests.test_docs import commands

ROOT = Path(__file__).resolve().parent.parent
OWN = ROOT / "examples" / "own"
GUIDE = ROOT / "docs" / "guide" / "models.md"
MODEL = "examples.own.model:build"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def test_the_guide_shows_the_example_as_it_is() -> None:
    shown, there = tomllib.loads(blocks("toml")[0]), tomllib.loads((OWN / "data.toml").read_text())
    assert there == shown | {"model": MODEL}
    (build,) = (block for block in blocks("python") if block.startswith("def build"))
    assert build in (OWN / "model.py").read_text()


def test_the_commands_of_the_guide_train_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert (
        (tmp_path / "own" / "said.csv")
        .read_text()
        .splitlines()[0]
        .startswith("row,target,prediction")
    )


def owns(tmp_path: Path, change: Callable[[str], str] = str) -> Path:
    """A copy of the example's data whose description is changed."""
    folder = tmp_path / "mine"
    shutil.copytree(OWN, folder)
    (folder / "data.toml").write_text(change((OWN / "data.toml").read_text()))
    return folder


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("Ann Lee,5,0.1,70,32,rest,HIV", "line 8: 7 columns, but the header has 6"),
        (
            "Ann Lee,HIV,0.1,70,32,rest",
            "line 8: steps is not a number: make it one, or describe it under [columns] in "
            "data.toml",
        ),
        (
            "Ann Lee,5,0.1,70,32,HIV",
            "line 8: activity is not one of classes: add the class in data.toml, or correct it",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_said_without_the_row(
    row: str, said: str, tmp_path: Path
) -> None:
    folder = owns(tmp_path)
    lines = (folder / "train.csv").read_text().splitlines()
    (folder / "train.csv").write_text("\n".join([*lines[:7], row, *lines[8:]]))
    with pytest.raises(FolderError) as error:
        load_task("folder", path=str(folder))
    assert str(error.value) == f"{folder.resolve() / 'train.csv'}, {said}"
    assert error.value.__suppress_context__  # a traceback would show the reader's own message


def test_how_many_classes_occur_is_not_taken_from_the_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros((4, 2)), y=np.array([0, 1, 1, 0]))
    (tmp_path / "data.toml").write_text(
        'format = "npz"\nfile = "a.npz"\ntest = "a.npz"\ntarget = "y"\n'
    )
    with pytest.raises(
        FolderError,
        match=r"must give classes or num_classes",
    ):
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
    "model.py": r"model\.name must name a module .*model:function \(got model\.py\)",
    "./tests/test_own.py:wide": r"model\.name must name a module .*tests\.test_own:wide \(got ./t",
    "tests.test_own:detached": "model.name: .*detached has no gradient .*: element 0 of tensors",
    "no.such.module:build": "'no.such.module' of no.such.module:build can't be imported: No "
    "module named 'no'",
    "tests.test_own:wide": r"model\.name: .*wide can't .* \(4,\)",
    "tests.test_own:centred": r"model\.name: .*centred mixes",
    "tests.test_own:observed": "the model's forward changes 1.largest: ",
    "tests.test_own:jitter": r"model\.name: .*jitter draws random numbers",
    "mpl": "no model 'mpl'; known are logistic_regression, .*, package.module:function, or "
    "hf:FOLDER",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_can_not_be_trained_is_refused_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    words = [
        "data.name=folder",
        f"data.path={OWN}",
        f"model.name='{name}'",
        f"output_dir={tmp_path / 'run'}",
    ]
    with pytest.raises(ConfigError, match=REFUSED[name]) as error:
        simulate(*load_asked(words))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


NODE_RUN = (
    "privacy.user.enabled=false",
    "privacy.user.target_epsilon=null",
    "data.name=folder",
    "data.num_clients=2",
)


def test_a_node_trains_the_model_that_its_owner_has_named(tmp_path: Path) -> None:
    run = load_config([*NODE_RUN, f"model.name={MODEL}", "data.path=/the/servers"])
    node = {"data": str(owns(tmp_path))}
    client = node_client(received(request(run), node), node)
    assert len(client.examples) == 2400
    assert (
        sum(parameter.numel() for parameter in client.model.parameters())
        == 4 * 16 + 16 + 32 + 16 * 3 + 3
    )


@pytest.mark.parametrize("name", ["tests.test_own:wide", "os:abort"])
def test_a_node_imports_nothing_that_its_owner_has_not_named(name: str, tmp_path: Path) -> None:
    run = load_config([*NODE_RUN, f"model.name='{name}'"])
    with pytest.raises(Refused, match="not the model that"):
        received(request(run), {"data": str(owns(tmp_path))})


def test_a_node_without_data_of_its_own_imports_nothing_and_reads_no_folder() -> None:
    node = {"partition-id": 0, "num-partitions": 2}
    digits = load_config([*NODE_RUN, "data.name=digits", "model.name='os:abort'"])
    with pytest.raises(Refused, match="not the model that"):
        received(request(digits), node)
    folder = load_config([*NODE_RUN, f"data.path={OWN}"])
    with pytest.raises(Refused, match="node has no data"):
        node_client(work_of(request(folder)), node)


def test_a_project_is_told_whose_data_an_experiment_of_discreets_own_uses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places._say_own.cache_clear()
    conf = places.conf_for(["experiment=silos"], tmp_path)
    assert conf == places.conf_for(["experiment=silos", "data.path=data"], tmp_path)
    first, second = caplog.messages
    assert "its data and settings are used" in first
    assert "its settings are used" in second
