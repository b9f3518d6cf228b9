"""A small private loop for the tests, and the same loop by hand: one example a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from discreet.central.dpsgd import DPSGD
from discreet.privacy.randomness import seeded_source
from discreet.training.local_training import step_batch, step_noise
from tests.client.clients import clipped, examples, gradients, linear, params_of

SEED, CLIP, NOISE, BATCH, SIZE = 71993, 0.4, 0.8, 8, 30
Made = Callable[[Any], Optimizer]
COUNTED = examples(SIZE)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def private(model: nn.Module, made: Made = sgd, *, dataset: Any = None, **settings: Any) -> DPSGD:
    """A loop over 30 examples in Poisson batches of 8, reproducible, with what a test wants otherwise."""
    data = TensorDataset(COUNTED.inputs, COUNTED.targets) if dataset is None else dataset
    usual = {"batch_size": BATCH, "epochs": 2, "delta": 1e-3, "l2_norm_clip": CLIP, "seed": SEED}
    if not settings.keys() & {"noise_multiplier", "target_epsilon"}:
        usual["noise_multiplier"] = NOISE
    return DPSGD(model, made(value for value in model.parameters() if value.requires_grad), data, **usual | settings)


def run(loop: DPSGD) -> DPSGD:
    """All steps."""
    for inputs, targets in loop:
        loop.step(inputs, targets)
    return loop


def by_hand(made: Made, *, halve_every: int | None = None, noise: float = NOISE) -> Tensor:
    """The parameters after a loop as `private`'s, with plain torch; the learning rate may be halved every few steps."""
    model, source = linear(), seeded_source(SEED)
    optimizer = made(model.parameters())
    for step in range(8):
        drawn = step_batch(source, step, SIZE, probability=BATCH / SIZE)
        total = clipped(gradients(model, COUNTED.subset(drawn)), CLIP)
        drawn_noise = step_noise(source, step).normal(len(total), stddev=noise * CLIP)
        mean, start = (total + drawn_noise) / BATCH, 0
        for value in model.parameters():
            value.grad = mean[start : start + value.numel()].view(value.shape).clone()
            start += value.numel()
        optimizer.step()
        if halve_every and (step + 1) % halve_every == 0:
            optimizer.param_groups[0]["lr"] /= 2
    return params_of(model)
