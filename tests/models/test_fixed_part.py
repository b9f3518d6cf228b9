"""A frozen first part is computed once: what is learned behind it is what the whole model would have learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from discreet.data.datasets import load_task
from discreet.data.examples import Examples
from discreet.models import fixed_part
from discreet.models.fixed_part import behind_fixed, features_of, split_fixed
from discreet.models.models import build_model
from discreet.models.scattering import Scattering
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.tiny_transformers import write_bert, write_texts

LEVELS = {
    "user": ["privacy.user.noise_multiplier=0.3", "privacy.user.target_epsilon=null"],
    "example": [
        *("privacy.user.enabled=false", "privacy.user.target_epsilon=null"),
        *("privacy.example.enabled=true", "privacy.example.noise_multiplier=0.3"),
    ],
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    weights = write_bert(tmp_path / "weights", pooled=True)
    data = ["data.name=folder", f"data.path={write_texts(tmp_path / 'texts', weights)}", "data.partition=natural"]
    return [*data, f"model.name=hf:{weights}", "data.num_clients=12", "rounds=2", "training.epochs=2", "seed=31013"]


def learned(words: list[str], folder: Path) -> Tensor:
    simulate(load_config([*words, f"output_dir={folder}"]))
    last = RunFolder(folder).load_checkpoint()
    assert last is not None
    return last.params


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_on_features_is_the_run_of_the_whole_model(
    level: str, engine: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, *LEVELS[level], f"engine={engine}", "model.freeze=[features.*]"]
    split = learned(words, tmp_path / "split")
    assert split.shape == (3 * 16 + 3,)
    monkeypatch.setattr(fixed_part, "split_fixed", lambda model, _: (None, model))
    torch.testing.assert_close(split, learned(words, tmp_path / "whole"), rtol=0, atol=1e-5)


def test_patterns_that_freeze_nothing_or_everything_are_refused(words: list[str], tmp_path: Path) -> None:
    for pattern, said in {
        "nobody.*": "matches no parameter; there are",
        "*": "leaves no parameter to train, of",
    }.items():
        with pytest.raises(ConfigError, match=rf"model\.freeze: .*\* {said} features\.body"):
            learned([*words, f"model.freeze=[{pattern}]"], tmp_path / "run")


@pytest.mark.parametrize("place", ["memory", "file", "node"])
def test_features_are_computed_once_and_their_files_are_private_or_without_a_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_part, "_held", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if place == "file":
        monkeypatch.setattr(fixed_part, "MEMORY", 8)
    if place == "node":
        monkeypatch.setenv("DISCREET_FEATURES", str(tmp_path))
    layer, inputs = torch.nn.Linear(2, 3).requires_grad_(False), torch.rand(5, 2)
    examples = Examples(inputs, torch.zeros(5, dtype=torch.int64))
    assert torch.equal(fixed_part.features_of(layer, examples, batch_size=5).inputs, layer(inputs))
    assert [path.suffix for path in tmp_path.iterdir()] == ([".npy"] if place == "node" else [])
    if place == "node":  # in the process of the next message
        fixed_part._held.clear()
    with monkeypatch.context() as patched:
        patched.setattr(layer, "forward", None)
        again = fixed_part.features_of(layer, examples).inputs
    assert torch.equal(again, torch.nn.functional.linear(inputs, *layer.parameters()))
    layer.bias.data.add_(1)
    assert torch.equal(fixed_part.features_of(layer, examples, batch_size=5).inputs, layer(inputs))


@pytest.mark.parametrize(("level", "engine"), [("user", "auto"), ("example", "sequential")])
def test_a_run_of_a_transformers_last_block_is_that_of_the_whole_model(
    level: str, engine: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, split = list[str](), fixed_part.split_fixed
    (tmp_path / "weights" / "modules.json").unlink()  # of the pooling

    def seen(model: torch.nn.Module, inputs: Tensor) -> tuple[torch.nn.Module | None, torch.nn.Module]:
        parts = split(model, inputs)
        found.append(type(parts[1]).__name__)
        return parts

    words = [*words, *LEVELS[level], f"engine={engine}", "model.freeze=['*.embeddings.*','*.layer.0.*']"]
    monkeypatch.setattr(fixed_part, "split_fixed", seen)
    one = learned(words, tmp_path / "split")
    assert set(found) == {"Rest"}
    monkeypatch.setattr(fixed_part, "split_fixed", lambda model, _: (None, model))
    torch.testing.assert_close(one, learned(words, tmp_path / "whole"), rtol=0, atol=1e-6)


class Whispers(nn.Module):
    """A frozen layer in which an example moves all others a little: too little to be seen in what is made up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found + 1e-6 * found.mean(0)


class Branches(Whispers):
    """A frozen layer that takes a branch for each example, which only one of them decides: nothing is mixed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool((x < 100).all()) else 2 * self.inner(x)


def frozen_first(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer.requires_grad_(False), nn.Linear(3, 2))


@pytest.mark.parametrize("layer", [Whispers, Branches])
def test_an_example_moves_no_features_of_another(layer: type[nn.Module]) -> None:
    model, inputs = frozen_first(layer()), torch.randn(9, 4, generator=torch.Generator().manual_seed(50929))
    huge = inputs.clone()
    huge[3] = 1e9
    read = [behind_fixed(model, Examples(each, torch.zeros(9).long()))[1].inputs for each in (inputs, huge)]
    others = [place for place in range(9) if place != 3]
    assert torch.equal(read[0][others], read[1][others])


IMAGES = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(30977))


def test_an_image_does_not_change_the_features_of_another() -> None:
    fixed, others = Scattering((1, 28, 28)), IMAGES.clone()
    others[1:] = 1 - others[1:]
    torch.testing.assert_close(fixed(IMAGES)[0], fixed(others)[0], rtol=0, atol=1e-6)


def test_features_computed_once_are_those_of_the_whole_model() -> None:
    task = load_task("digits")
    model = build_model("scattering", task.shape.input_shape, 10, seed=1)
    fixed, learned = split_fixed(model, task.test.inputs)
    assert fixed is not None
    features = features_of(fixed, task.test, batch_size=7)
    assert torch.equal(features.targets, task.test.targets)
    torch.testing.assert_close(learned(features.inputs), model(task.test.inputs), rtol=0, atol=1e-5)
    assert features_of(fixed, task.test).inputs is features.inputs
