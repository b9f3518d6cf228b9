"""A small private loop for the tests, and the same loop by hand: one example a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.privacy.randomness import seeded_source
from discreet.privacy.rounded_sums import rounded_gaussian
from discreet.privacy.step_draws import step_batch, step_noise
from tests.node.clients import clipped, examples, gradients, linear, params_of

SEED, CLIP, NOISE, BATCH, SIZE = 71993, 0.4, 0.8, 8, 30
Made = Callable[[Any], Optimizer]
COUNTED = examples(SIZE)
PAIRS: list[tuple[Tensor, Tensor]] = list(zip(COUNTED.inputs, COUNTED.targets, strict=True))


def stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([one for one, _ in pairs]), torch.stack([other for _, other in pairs])


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def private(model: nn.Module, made: Made = sgd, *, dataset: Any = None, **settings: Any) -> DPSGD:
    """A loop over 30 examples in Poisson batches of 8, reproducible, but for `settings`, of DPSGD
    or LoopPrivacy."""
    data = TensorDataset(COUNTED.inputs, COUNTED.targets) if dataset is None else dataset
    usual = {"batch_size": BATCH, "delta": 1e-3, "clip_norm": CLIP, "seed": SEED}
    if not settings.keys() & {"noise_multiplier", "target_epsilon"}:
        usual["noise_multiplier"] = NOISE
    if "steps" not in settings:
        usual["epochs"] = 2
    given = usual | settings
    privacy = {
        field.name: given.pop(field.name) for field in fields(LoopPrivacy) if field.name in given
    }
    optimizer = made(value for value in model.parameters() if value.requires_grad)
    return DPSGD(model, optimizer, data, privacy=LoopPrivacy(**privacy), **given)


def run(loop: DPSGD) -> DPSGD:
    """All steps."""
    for inputs, targets in loop:
        loop.step(inputs, targets)
    return loop


def by_hand(made: Made, *, noise: float = NOISE) -> Tensor:
    """The parameters after a loop as `private`'s, with plain torch."""
    model, source = linear(), seeded_source(SEED)
    optimizer = made(model.parameters())
    for step in range(8):
        drawn = step_batch(source, step, SIZE, probability=BATCH / SIZE)
        total = clipped(gradients(model, COUNTED.subset(drawn)), CLIP)
        mean = rounded_gaussian(total, noise * CLIP, step_noise(source, step)) / BATCH
        for value, part in zip(
            model.parameters(),
            torch.split(mean, [v.numel() for v in model.parameters()]),
            strict=True,
        ):
            value.grad = part.view(value.shape).clone()
        optimizer.step()
    return params_of(model)
