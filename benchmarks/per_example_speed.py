"""The cost of per-example clipping for three small models that are a Sequential: as `loop`, without
an account.

The step is that of a client: the clipped sum, noise from the operating system's randomness, and the
update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.loop_speed import (
    CLIP,
    LEARNING_RATE,
    NOISE_MULTIPLIER,
    SECONDS,
    Step,
    clipped_sum,
    compared,
)
from benchmarks.people_models import Case
from benchmarks.side_by_side import Row
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import secure_source


def logistic_regression() -> nn.Module:
    """784-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def perceptron() -> nn.Module:
    """784-128-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutions() -> nn.Module:
    """The 16-32 tanh network of Papernot et al. 2021 and Tramer and Boneh 2021."""
    first = [nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)]
    second = [nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lr": logistic_regression,
    "mlp": perceptron,
    "cnn": convolutions,
}


def rows(
    models: Sequence[str] = tuple(MODELS),
    batches: Sequence[int] = (64, 256),
    *,
    seconds: float = SECONDS,
) -> list[Row]:
    """A row for each model and batch size, as in `loop_speed.compared`."""

    def case(name: str, count: int) -> Callable[[], Case]:
        return lambda: Case(
            MODELS[name](), torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))
        )

    return compared(
        {f"{name}, {count}": case(name, count) for name in models for count in batches},
        seconds,
        stepped=step_of,
    )


def step_of(case: Case) -> Step:
    """One step of DP-SGD: the clipped sum, noise, and the update over the batch size."""
    parameters, source, mechanism = (
        tuple(case.model.parameters()),
        secure_source(),
        Gaussian(NOISE_MULTIPLIER),
    )
    sizes = [value.numel() for value in parameters]

    @torch.no_grad()
    def step() -> None:
        noised = mechanism.add_noise(clipped_sum(case, CLIP)[0], CLIP, source)
        for value, change in zip(parameters, torch.split_with_sizes(noised, sizes), strict=True):
            value.sub_(change.view(value.shape), alpha=LEARNING_RATE / len(case.targets))

    return Step(step, lambda: None)
