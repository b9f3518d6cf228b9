"""Local work against loops written by hand: one example a backward pass, plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.models.models import flatten_parameters
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.settings.training import TaskConfig
from discreet.training.local_training import (
    ExamplePrivacy,
    LocalSettings,
    first_state,
    local_update,
    take_step,
)
from discreet.training.shared_step import SharedClip, shared_step
from tests.models.test_frozen import MODELS, built
from tests.node.clients import clipped, examples, gradients, linear, params_of, rejects_gaussian

RATE, MOMENTUM, CLIP = 0.3, 0.7, 0.4


def close(one: Tensor, other: Tensor, *, rtol: float = 1e-4, atol: float = 1e-6) -> bool:
    return torch.allclose(one, other, rtol=rtol, atol=atol)


def dp(
    noise_multiplier: float, *, epochs: int = 1, batch_size: int = 8, momentum: float = 0.0
) -> LocalSettings:
    return LocalSettings(
        epochs, batch_size, RATE, momentum, ExamplePrivacy(CLIP, noise_multiplier, "float")
    )


def work(
    data: Examples,
    how: LocalSettings,
    source: RandomSource,
    build: Callable[[], nn.Module] = linear,
) -> Tensor:
    return local_update(build(), flatten_parameters(build()), data, settings=how, source=source)


def gradient_of(model: nn.Module, data: Examples) -> Tensor:
    """By plain autograd, of what is trained."""
    loss = nn.functional.cross_entropy(model(data.inputs), data.targets)
    values = [value for value in model.parameters() if value.requires_grad]
    found = torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


def dp_sgd_by_hand(
    data: Examples,
    steps: list[tuple[Tensor, Tensor]],
    how: LocalSettings,
    build: Callable[[], nn.Module] = linear,
) -> Tensor:
    """The update after steps with these batches and noise."""
    model = build()
    values = [value for value in model.parameters() if value.requires_grad]
    start = torch.cat([value.detach().flatten() for value in values])
    velocity = torch.zeros_like(start)
    for batch, drawn in steps:
        found = [
            gradient_of(model, data.subset(batch[place : place + 1])) for place in range(len(batch))
        ]
        total = clipped(found, CLIP) if found else torch.zeros_like(start)
        velocity = how.momentum * velocity + (total + drawn) / how.batch_size
        for value, part in zip(
            values, torch.split(velocity, [value.numel() for value in values]), strict=True
        ):
            value.data -= RATE * part.view_as(value)
    return torch.cat([value.detach().flatten() for value in values]) - start


@pytest.mark.parametrize("build", [linear, *(partial(built, build) for build in MODELS.values())])
def test_dp_sgd_draws_poisson_batches_and_noise_for_every_step(
    build: Callable[[], nn.Module],
) -> None:
    data, how, source = (
        examples(9),
        dp(1.3, epochs=2, batch_size=3, momentum=MOMENTUM),
        seeded_source(60251),
    )
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
    """A source with which both steps of a client of 2 examples and batch size 1 draw an empty
    batch."""
    for seed in range(3001, 3501):
        draws = [
            seeded_source(seed).child("step", number).child("batch").words(2) for number in range(2)
        ]
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
    monkeypatch.setattr(
        "discreet.privacy.step_draws.poisson_sample", lambda count, **_: torch.arange(count)
    )
    data, how = examples(12), dp(0.0, batch_size=3)
    expected = dp_sgd_by_hand(data, [(torch.arange(12), torch.zeros(18))] * 4, how)
    assert close(work(data, how, seeded_source(1907)), expected)


def test_the_noise_of_a_step_has_the_standard_deviation_of_sigma_c_over_b() -> None:
    model, data = linear(dims=200, classes=100), examples(4, dims=200, classes=100)
    start = params_of(model)
    noisy, quiet = (
        local_update(model, start, data, settings=dp(noise), source=seeded_source(419))
        for noise in (1.7, 0.0)
    )
    noise, stddev = noisy - quiet, RATE * 1.7 * CLIP / 8
    assert len(noise) == 20_100
    assert not rejects_gaussian(noise, stddev)
    assert rejects_gaussian(noise, 0.9 * stddev)
    assert rejects_gaussian(noise, 1.1 * stddev)


OF_ADAM, STEPS = 0.05, 7
SHAPES = ((3, 4), (5,))
PLAIN = LocalSettings(2, 3, OF_ADAM, 0.0)
WAYS = {
    "sgd": PLAIN,
    "sgd with momentum": replace(PLAIN, momentum=0.9),
    "sgd with weight decay": replace(PLAIN, weight_decay=0.3),
    "sgd with both": replace(PLAIN, momentum=0.9, weight_decay=0.3),
    "adam": replace(PLAIN, optimizer="adam"),
    "adam with weight decay": replace(PLAIN, optimizer="adam", weight_decay=0.3),
    "adamw": replace(PLAIN, optimizer="adamw", weight_decay=0.3),
}


def of_torch(
    how: LocalSettings, params: list[nn.Parameter], steps: int
) -> tuple[torch.optim.Optimizer, Any]:
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
        how.optimizer
    ]
    more = {"momentum": how.momentum} if how.optimizer == "sgd" else {}
    optimizer = kind(params, lr=how.learning_rate, weight_decay=how.weight_decay, **more)
    schedulers = torch.optim.lr_scheduler
    return optimizer, {
        "constant": schedulers.ConstantLR(optimizer, 1.0),
        "cosine": schedulers.CosineAnnealingLR(optimizer, steps),
        "linear": schedulers.LinearLR(optimizer, 1.0, 0.0, steps),
    }[how.schedule]


def by_torch(
    how: LocalSettings, start: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    """The parameters after torch.optim's steps with these gradients, one list a step."""
    params = [nn.Parameter(values.clone()) for values in start]
    optimizer, scheduler = of_torch(how, params, len(gradients))
    for step in gradients:
        for values, gradient in zip(params, step, strict=True):
            values.grad = gradient.clone()
        optimizer.step()
        scheduler.step()
    return [values.detach() for values in params]


def drawn(clients: int, steps: int = STEPS) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Parameters (clients, ...), and gradients of each step."""
    generator = torch.Generator().manual_seed(70123)
    first, *rest = [
        [torch.randn(clients, *shape, generator=generator) for shape in SHAPES]
        for _ in range(steps + 1)
    ]
    return first, rest


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_pauses_and_ends_early_is_moved_as_if_it_were_alone(
    way: str, schedule: str
) -> None:
    """Client 1 has no batch in steps 2, 3 and 6, as at the end of an epoch: its own steps are what
    counts for it."""
    how, (params, gradients) = replace(WAYS[way], schedule=schedule), drawn(2)
    own = {0: list(range(STEPS)), 1: [0, 1, 4, 5]}
    expected = {
        row: by_torch(
            how,
            [values[row] for values in params],
            [[part[row] for part in gradients[n]] for n in steps],
        )
        for row, steps in own.items()
    }
    state = first_state(how, params, [len(own[0]), len(own[1])])
    for number, step in enumerate(gradients):
        active = 2 if number in own[1] else 1
        take_step(
            how, state, [values[:active] for values in params], [part[:active] for part in step]
        )
    for row, wanted in expected.items():
        torch.testing.assert_close([values[row] for values in params], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "build"),
    [(way, linear) for way in WAYS]
    + [("sgd with momentum", partial(built, build)) for build in MODELS.values()],
)
def test_a_client_goes_where_a_loop_with_torch_optim_goes(
    way: str, build: Callable[[], nn.Module]
) -> None:
    data, model, how = examples(7), build(), replace(WAYS[way], schedule="cosine")
    start = flatten_parameters(model)
    optimizer, scheduler = of_torch(how, list(model.parameters()), 6)
    for epoch in range(2):
        for batch in torch.split(seeded_source(5119).child("epoch", epoch).permutation(7), 3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[batch]), data.targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
    update = local_update(build(), start, data, settings=how, source=seeded_source(5119))
    torch.testing.assert_close(update, flatten_parameters(model) - start, rtol=1e-4, atol=1e-5)


SOURCE = seeded_source(40961)
SMALL_CLIP = 0.05


def some_examples(count: int) -> Examples:
    generator = torch.Generator().manual_seed(40961)
    return Examples(
        torch.randn(count, 6, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def some_model() -> nn.Module:
    torch.manual_seed(40961)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def step_of(examples: Examples, *, task: TaskConfig | None = None) -> Tensor:
    model = some_model()
    settings = LocalSettings(1, 20, 0.5, 0.0, task=task or TaskConfig())
    return shared_step(
        model,
        flatten_parameters(model),
        examples,
        settings=settings,
        clip=SharedClip(SMALL_CLIP, SOURCE),
    )


@pytest.mark.parametrize(
    "task", [TaskConfig(), TaskConfig(class_weights=[0.5, 1.0, 2.0])], ids=["plain", "weighted"]
)
def test_it_is_a_loop_of_clipped_gradients_times_minus_rate_over_public_batch_size(
    task: TaskConfig,
) -> None:
    model, examples = some_model().double(), some_examples(12)
    weights = torch.tensor(task.class_weights or [1.0, 1.0, 1.0], dtype=torch.float64)
    total = torch.zeros(flatten_parameters(model).shape, dtype=torch.float64)
    for inputs, target in zip(examples.inputs.double(), examples.targets, strict=True):
        loss = nn.functional.cross_entropy(model(inputs), target) * weights[target]
        gradient = torch.cat(
            [part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))]
        )
        total += gradient * min(1.0, SMALL_CLIP / float(gradient.norm()))
    assert step_of(examples, task=task).dtype == torch.float64
    torch.testing.assert_close(
        step_of(examples, task=task), -0.5 / 20 * total, rtol=1e-5, atol=1e-9
    )


def test_one_example_moves_it_by_at_most_its_norm_and_none_give_zeros() -> None:
    more, fewer = some_examples(12), some_examples(12).subset(torch.arange(1, 12))
    assert float((step_of(more) - step_of(fewer)).norm()) <= 0.5 * SMALL_CLIP / 20 * (1 + 1e-9)
    assert not step_of(some_examples(12).subset(torch.arange(0))).any()
