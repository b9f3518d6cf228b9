"""A model of one's own carries nothing from one client to the next in a process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.models.models import flatten_parameters
from discreet.privacy.randomness import seeded_source
from discreet.run_files.compose import load_asked
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from discreet.training.local_training import LocalSettings, local_update
from tests.node.clients import examples

LATE = 8  # forwards, after which what is kept is used


class InAttributes(nn.Module):
    """Outputs are divided by a mean of earlier ones, after some forwards."""

    def __init__(self, inputs: int = 5, outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.mean, self.calls = 0.0, 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        earlier, self.mean = self.mean, 0.5 * self.mean + float(outputs.detach().abs().mean())
        self.calls += 1
        return outputs / (1 + earlier) if self.calls > LATE else outputs


KEPT = SimpleNamespace(mean=0.0, calls=0, turned=False)


class Elsewhere(InAttributes):
    """The same, in an object that is a global name."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean, self.calls = KEPT.mean, KEPT.calls
        outputs = super().forward(inputs)
        KEPT.mean, KEPT.calls = self.mean, self.calls
        return outputs


class InAList(InAttributes):
    """The same, in a list that is an attribute."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.means = [0.0]

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean, self.calls = self.means[-1], len(self.means)
        outputs = super().forward(inputs)
        self.means.append(self.mean)
        return outputs


def in_a_list(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return InAList(input_shape[0], num_classes)


def in_attributes(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return InAttributes(input_shape[0], num_classes)


def elsewhere(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Elsewhere(input_shape[0], num_classes)


def test_what_a_client_leaves_in_the_models_attributes_reaches_no_other() -> None:
    model = InAttributes()
    start = flatten_parameters(model)
    settings = LocalSettings(2, 5, 0.3, 0.0)
    data = examples(30)
    one = Examples(100 * data.inputs[:15], data.targets[:15])
    other = Examples(data.inputs[15:], data.targets[15:])

    def update(of: Examples) -> Tensor:
        return local_update(model, start, of, settings=settings, source=seeded_source(5))

    alone = update(other)
    update(one)
    assert torch.equal(update(other), alone)


class InABuffer(nn.Module):
    """After an example beyond a range, which few clients have, all outputs are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("turned", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if bool((inputs > 40).any()):
            self.turned.fill_(1.0)
        return -outputs if bool(self.turned) else outputs


class InAnObject(nn.Module):
    """The same, in an object that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.kept = SimpleNamespace(turned=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.kept.turned |= bool((inputs > 40).any())
        return -outputs if self.kept.turned else outputs


class InAGlobalName(InAnObject):
    """The same, in an object that is a global name."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        KEPT.turned |= bool((inputs > 40).any())
        return -outputs if KEPT.turned else outputs


@pytest.mark.parametrize("kind", [InABuffer, InAnObject, InAGlobalName])
def test_what_only_some_client_leaves_reaches_no_other(kind: type[nn.Module]) -> None:
    model = kind()
    start = flatten_parameters(model)
    data = examples(30)
    outlier = Examples(data.inputs[:15].clone(), data.targets[:15])
    outlier.inputs[0] = 50.0
    other = Examples(data.inputs[15:], data.targets[15:])

    def update(of: Examples) -> Tensor:
        settings = LocalSettings(2, 5, 0.3, 0.0)
        return local_update(model, start, of, settings=settings, source=seeded_source(5))

    alone = update(other)
    update(outlier)
    assert torch.equal(update(other), alone)


def test_a_run_with_a_model_that_keeps_something_outside_of_itself_is_refused(
    tmp_path: Path,
) -> None:
    words = [
        "data.name=breast_cancer",
        "data.num_clients=40",
        "rounds=1",
        "privacy.user.noise_multiplier=1",
    ]
    of = "model.name=tests.training.test_clients_apart:"
    for model, place in (("elsewhere", "KEPT"), ("in_a_list", "InAList.means")):
        with pytest.raises(ConfigError, match=f"leaves something of its examples in {place}"):
            simulate(*load_asked([*words, f"{of}{model}", f"output_dir={tmp_path / 'run'}"]))
        assert not (tmp_path / "run").exists()
    simulate(*load_asked([*words, f"{of}in_attributes", f"output_dir={tmp_path / 'run'}"]))
