"""Frozen parameters in the federation: no gradient, no share in the clip, no noise, not sent; and
shared ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.mechanisms.client_noise import LocalPrivacy
from discreet.mechanisms.local_noise import release_step
from discreet.models.models import flatten_parameters, frozen, frozen_digest
from discreet.node import nodes
from discreet.node.work import work_of
from discreet.per_example.objective import trainable
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.protocol.messages import MalformedMessage, request_items, request_of
from discreet.run_files.compose import load_asked
from discreet.run_files.predictions import named_parameters_of
from discreet.run_files.run_folder import RunFolder
from discreet.server.model_check import check_model
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from discreet.training.local_training import ExamplePrivacy, LocalSettings, local_update
from tests.command import predict
from tests.node.clients import OFF, client, config, examples, request
from tests.replay import replay
from tests.test_neighbour_replay import wild_examples, with_example

OWN = Path(__file__).resolve().parent.parent.parent / "examples" / "own"
CLIP, NOISE, RATE = 0.4, 0.7, 0.3
FIXED = 90121  # the seed of what stands for a pretrained backbone


def pretrained(width: int, out: int) -> nn.Linear:
    """A frozen layer that is the same whenever it is built."""
    layer, draw = nn.Linear(width, out), torch.Generator().manual_seed(FIXED)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(out, width, generator=draw))
    nn.init.zeros_(layer.bias)
    return layer.requires_grad_(requires_grad=False)


def head(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A pretrained backbone, and what learns on it."""
    return nn.Sequential(
        nn.Flatten(), pretrained(math.prod(input_shape), 6), nn.Tanh(), nn.Linear(6, num_classes)
    )


def statistics(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A pretrained backbone with BatchNorm, whose statistics are frozen with its weights."""
    norm, values = nn.BatchNorm1d(6), torch.linspace(0.5, 1.5, 6)
    norm.load_state_dict(
        {"weight": values, "bias": -values, "running_mean": values, "running_var": 2 * values},
        False,
    )
    norm.requires_grad_(requires_grad=False).eval()
    return nn.Sequential(
        nn.Flatten(), pretrained(math.prod(input_shape), 6), norm, nn.Linear(6, num_classes)
    )


class Residual(nn.Module):
    """A forward of its own, with a frozen layer in the middle and a weight that no pass uses."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(width, 6),
            pretrained(6, 6),
            nn.Linear(6, num_classes),
        )
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.last(hidden + torch.tanh(self.middle(hidden)))


def residual(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Residual(math.prod(input_shape), num_classes)


def shared(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A sequence in which a layer stands twice."""
    layer = nn.Linear(5, 5)
    return nn.Sequential(
        nn.Linear(math.prod(input_shape), 5), layer, nn.Tanh(), layer, nn.Linear(5, num_classes)
    )


def hooked(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A sequence that does more than its layers."""
    model = nn.Sequential(nn.Linear(math.prod(input_shape), num_classes))
    model[0].register_forward_hook(lambda module, given, found: found * 2)
    return model


MODELS = {
    "head": head,
    "statistics": statistics,
    "residual": residual,
    "shared": shared,
    "hooked": hooked,
}
of_each_model = pytest.mark.parametrize("build", MODELS.values())
Build = Callable[[tuple[int, ...], int], nn.Module]


def built(build: Build) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(4177)
        return build((5,), 3)


def update_of(
    build: Build, data: Examples, source: RandomSource, noise: float | None = None
) -> Tensor:
    example = None if noise is None else ExamplePrivacy(CLIP, noise)
    how, model = LocalSettings(2, 3, RATE, 0.5, example), built(build)
    return local_update(model, flatten_parameters(model), data, settings=how, source=source)


@wild_examples
@pytest.mark.parametrize("build", [head, statistics, residual, shared])
def test_an_example_moves_each_step_within_the_clip_of_what_is_trained(
    build: Build, factor: float
) -> None:
    there, zeroed = with_example(examples(6), factor), with_example(examples(6), math.nan)
    for one, other in ((there, zeroed), (zeroed, there)):
        found = replay(lambda data, source: update_of(build, data, source, NOISE), one, other)
        assert found.faults == ()
        assert len(found.shares) == 6


@of_each_model
def test_frozen_values_stay_and_are_no_part_of_what_travels(build: Build) -> None:
    model = built(build)
    check_model(model)
    before = {name: value.clone() for name, value in frozen(model).items()}
    update = local_update(
        model,
        flatten_parameters(model),
        examples(7),
        settings=LocalSettings(2, 3, RATE, 0.5),
        source=seeded_source(8),
    )
    assert update.shape == (sum(value.numel() for value in trainable(model)),)
    assert all(torch.equal(value, before[name]) for name, value in frozen(model).items())


def test_a_step_with_laplace_noise_is_of_what_is_trained() -> None:
    privacy, how = LocalPrivacy("laplace_step", 0.5, 1.0), LocalSettings(1, 1, RATE, 0.0)
    run = partial(release_step, training=how, privacy=privacy)
    one, other = with_example(examples(6), 1.0), with_example(examples(6), 1e6)
    found = replay(lambda data, source: run(built(head), data, source=source), one, other)
    assert found.faults == ()
    assert len(run(built(head), one, source=seeded_source(5))) == 6 * 3 + 3


def test_a_client_refuses_to_train_on_other_frozen_values_than_the_servers() -> None:
    # The server's digest travels with the request; values, names and statistics count.
    who = replace(client(examples(4)), model=built(statistics))
    asked = replace(request(config(*OFF)), frozen=frozen_digest(built(statistics)))
    params = flatten_parameters(who.model)
    assert request_of(request_items(asked)) == asked
    assert who.answer(work_of(asked), params).update.shape == params.shape
    for name, value in frozen(who.model).items():
        before = value.clone()
        value.add_(1)
        with pytest.raises(MalformedMessage, match="frozen values of the model mlp"):
            who.answer(work_of(asked), params)
        assert frozen_digest(who.model) != frozen_digest(built(statistics)), name
        value.copy_(before)
    assert who.answer(work_of(asked), params).update.shape == params.shape
    assert frozen_digest(nn.Linear(2, 2)) == ""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    nodes.model_of.cache_clear()
    data = [
        "data.name=folder",
        f"data.path={OWN}",
        "data.num_clients=40",
        "rounds=2",
        "training.epochs=1",
    ]
    return [
        *data,
        "privacy.user.noise_multiplier=1",
        f"output_dir={tmp_path / 'run'}",
        "seed=31013",
    ]


@pytest.mark.parametrize(("model", "level"), [("head", "user"), ("statistics", "example")])
def test_a_run_from_conf_trains_saves_the_whole_model_and_predicts(
    model: str, level: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    by_example = [
        "privacy.user.enabled=false",
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=1",
    ]
    simulate(
        *load_asked(
            [
                *words,
                f"model.name=tests.models.test_frozen:{model}",
                *by_example * (level == "example"),
            ]
        )
    )
    like, last = MODELS[model]((4,), 3), RunFolder(run).load_checkpoint()
    assert len(last.params) == len(flatten_parameters(like))
    saved = load_file(run / "model.safetensors")
    assert {name: value.tolist() for name, value in saved.items()} == {
        name: value.tolist() for name, value in named_parameters_of(like, last.params).items()
    }
    assert (
        predict([str(run), "--data", str(OWN / "test.csv"), "--out", str(tmp_path / "said.csv")])
        == 0
    )
    assert (
        f"accuracy {RunFolder(run).read_metrics()[-1]['accuracy']:.4f}" in capsys.readouterr().out
    )


def drawn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Frozen before anybody has trained it."""
    return nn.Sequential(
        nn.Linear(4, 6).requires_grad_(requires_grad=False), nn.Tanh(), nn.Linear(6, num_classes)
    )


def test_frozen_values_that_server_and_clients_would_not_share_are_refused(
    words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"frozen 0\.bias .*torch\.Gen"):
        simulate(*load_asked([*words, "model.name=tests.models.test_frozen:drawn"]))
    assert not (tmp_path / "run").exists()
