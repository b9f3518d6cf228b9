"""Local work against loops written by hand: one example a backward pass, plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from discreet.data.datasets import load_task
from discreet.data.examples import Examples
from discreet.models.models import build_model, flatten_parameters
from discreet.node.nodes import share_of
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.settings.compose import load_config
from discreet.settings.data import DataConfig
from discreet.simulation.in_process import simulate
from discreet.training.local_training import ExamplePrivacy, LocalSettings, local_update
from tests.models.test_frozen import MODELS, built
from tests.node.clients import clipped, examples, gradients, linear, params_of, rejects_gaussian, write

RATE, MOMENTUM, CLIP = 0.3, 0.7, 0.4


def close(one: Tensor, other: Tensor, *, rtol: float = 1e-4, atol: float = 1e-6) -> bool:
    return torch.allclose(one, other, rtol=rtol, atol=atol)


def dp(noise_multiplier: float, *, epochs: int = 1, batch_size: int = 8, momentum: float = 0.0) -> LocalSettings:
    return LocalSettings(epochs, batch_size, RATE, momentum, ExamplePrivacy(CLIP, noise_multiplier))


def work(data: Examples, how: LocalSettings, source: RandomSource, build: Callable[[], nn.Module] = linear) -> Tensor:
    return local_update(build(), flatten_parameters(build()), data, settings=how, source=source)


def gradient_of(model: nn.Module, data: Examples) -> Tensor:
    """By plain autograd, of what is trained."""
    loss = nn.functional.cross_entropy(model(data.inputs), data.targets)
    values = [value for value in model.parameters() if value.requires_grad]
    found = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


def dp_sgd_by_hand(
    data: Examples, steps: list[tuple[Tensor, Tensor]], how: LocalSettings, build: Callable[[], nn.Module] = linear
) -> Tensor:
    """The update after steps with these batches and noise."""
    model = build()
    values = [value for value in model.parameters() if value.requires_grad]
    start = torch.cat([value.detach().flatten() for value in values])
    velocity = torch.zeros_like(start)
    for batch, drawn in steps:
        found = [gradient_of(model, data.subset(batch[place : place + 1])) for place in range(len(batch))]
        total = clipped(found, CLIP) if found else torch.zeros_like(start)
        velocity = how.momentum * velocity + (total + drawn) / how.batch_size
        for value, part in zip(values, torch.split(velocity, [value.numel() for value in values]), strict=True):
            value.data -= RATE * part.view_as(value)
    return torch.cat([value.detach().flatten() for value in values]) - start


@pytest.mark.parametrize("build", [linear, *(partial(built, build) for build in MODELS.values())])
def test_dp_sgd_draws_poisson_batches_and_noise_for_every_step(build: Callable[[], nn.Module]) -> None:
    data, how, source = examples(9), dp(1.3, epochs=2, batch_size=3, momentum=MOMENTUM), seeded_source(60251)
    steps = []
    for number in range(6):
        draw = source.child("step", number)
        inside = draw.child("batch").words(9).astype(float) / 2**64 < 3 / 9
        noise = draw.child("noise").normal(len(flatten_parameters(build()))) * 1.3 * CLIP
        steps.append((torch.from_numpy(inside).nonzero().flatten(), noise))
    assert len({len(batch) for batch, _ in steps}) > 1
    assert max(float(gradient.norm()) for gradient in gradients(linear(), data)) > CLIP
    found = work(data, how, seeded_source(60251), build)
    torch.testing.assert_close(found, dp_sgd_by_hand(data, steps, how, build), rtol=1e-4, atol=1e-5)


def empty_source() -> RandomSource:
    """A source with which both steps of a client of 2 examples and batch size 1 draw an empty batch."""
    for seed in range(3001, 3501):
        draws = [seeded_source(seed).child("step", number).child("batch").words(2) for number in range(2)]
        if all((draw.astype(float) / 2**64 >= 0.5).all() for draw in draws):
            return seeded_source(seed)
    raise AssertionError("no such seed")


def test_empty_poisson_batches_are_noised_like_any_other() -> None:
    source = empty_source()
    drawn = sum(source.child("step", number).child("noise").normal(18) for number in range(2))
    update = work(examples(2), dp(1.1, batch_size=1), empty_source())
    assert torch.equal(work(examples(2), dp(0.0, batch_size=1), empty_source()), torch.zeros(18))
    assert torch.equal(work(examples(0), dp(1.0), seeded_source(33)), torch.zeros(18))
    assert close(update, -RATE * 1.1 * CLIP * torch.as_tensor(drawn), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_denominator_is_the_batch_size_whatever_the_client_has(count: int) -> None:
    data = examples(count)
    expected = -RATE * clipped(gradients(linear(), data), CLIP) / 8
    assert close(work(data, dp(0.0), seeded_source(77)), expected)


def test_a_poisson_batch_counts_whole_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discreet.training.local_training.poisson_sample", lambda count, **_: torch.arange(count))
    data, how = examples(12), dp(0.0, batch_size=3)
    expected = dp_sgd_by_hand(data, [(torch.arange(12), torch.zeros(18))] * 4, how)
    assert close(work(data, how, seeded_source(1907)), expected)


def test_the_noise_of_a_step_has_the_standard_deviation_of_sigma_c_over_b() -> None:
    model, data = linear(dims=200, classes=100), examples(4, dims=200, classes=100)
    start = params_of(model)
    noisy, quiet = (
        local_update(model, start, data, settings=dp(noise), source=seeded_source(419)) for noise in (1.7, 0.0)
    )
    noise, stddev = noisy - quiet, RATE * 1.7 * CLIP / 8
    assert len(noise) == 20_100
    assert not rejects_gaussian(noise, stddev)
    assert rejects_gaussian(noise, 0.9 * stddev)
    assert rejects_gaussian(noise, 1.1 * stddev)


def test_without_noise_and_clip_the_federation_is_plain_fedavg(tmp_path: Path) -> None:
    words = ["rounds=2", "seed=7703", "data.num_clients=4", "model.name=logistic_regression", "sampling.kind=everyone"]
    words += ["training.epochs=2", "training.batch_size=1000", f"training.learning_rate={RATE}", "server.momentum=0"]
    outcome = simulate(load_config([*words, "privacy.user.enabled=false", f"output_dir={tmp_path / 'run'}"]))

    task = load_task("digits", path=None)
    shares = [share_of(DataConfig(num_clients=4), number) for number in range(4)]
    model = build_model("logistic_regression", task.shape.input_shape, task.shape.num_classes, seed=7703)
    params = params_of(model)
    for _ in range(2):
        updates = []
        for share in shares:
            write(model, params)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(share.inputs), share.targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            updates.append(params_of(model) - params)
        params = params + torch.stack(updates).mean(0)
    assert close(outcome.checkpoint.params, params, atol=1e-5)
