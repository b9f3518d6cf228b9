"""The optimizers of local steps against torch.optim, for one client and for the rows of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discreet.models.models import flatten_parameters
from discreet.privacy.randomness import seeded_source
from discreet.training.local_training import LocalSettings, first_state, local_update, take_step
from tests.models.test_frozen import MODELS, built
from tests.node.clients import examples, linear

RATE, STEPS = 0.05, 7
SHAPES = ((3, 4), (5,))
PLAIN = LocalSettings(2, 3, RATE, 0.0)
WAYS = {
    "sgd": PLAIN,
    "sgd with momentum": replace(PLAIN, momentum=0.9),
    "sgd with weight decay": replace(PLAIN, weight_decay=0.3),
    "sgd with both": replace(PLAIN, momentum=0.9, weight_decay=0.3),
    "adam": replace(PLAIN, optimizer="adam"),
    "adam with weight decay": replace(PLAIN, optimizer="adam", weight_decay=0.3),
    "adamw": replace(PLAIN, optimizer="adamw", weight_decay=0.3),
}


def of_torch(how: LocalSettings, params: list[nn.Parameter], steps: int) -> tuple[torch.optim.Optimizer, Any]:
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[how.optimizer]
    more = {"momentum": how.momentum} if how.optimizer == "sgd" else {}
    optimizer = kind(params, lr=how.learning_rate, weight_decay=how.weight_decay, **more)
    schedulers = torch.optim.lr_scheduler
    return optimizer, {
        "constant": schedulers.ConstantLR(optimizer, 1.0),
        "cosine": schedulers.CosineAnnealingLR(optimizer, steps),
        "linear": schedulers.LinearLR(optimizer, 1.0, 0.0, steps),
    }[how.schedule]


def by_torch(how: LocalSettings, start: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
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
    first, *rest = [[torch.randn(clients, *shape, generator=generator) for shape in SHAPES] for _ in range(steps + 1)]
    return first, rest


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_pauses_and_ends_early_is_moved_as_if_it_were_alone(way: str, schedule: str) -> None:
    """Client 1 has no batch in steps 2, 3 and 6, as at the end of an epoch: its own steps are what counts for it."""
    how, (params, gradients) = replace(WAYS[way], schedule=schedule), drawn(2)
    own = {0: list(range(STEPS)), 1: [0, 1, 4, 5]}
    expected = {
        row: by_torch(how, [values[row] for values in params], [[part[row] for part in gradients[n]] for n in steps])
        for row, steps in own.items()
    }
    state = first_state(how, params, [len(own[0]), len(own[1])])
    for number, step in enumerate(gradients):
        active = 2 if number in own[1] else 1
        take_step(how, state, [values[:active] for values in params], [part[:active] for part in step])
    for row, wanted in expected.items():
        torch.testing.assert_close([values[row] for values in params], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "build"),
    [(way, linear) for way in WAYS] + [("sgd with momentum", partial(built, build)) for build in MODELS.values()],
)
def test_a_client_goes_where_a_loop_with_torch_optim_goes(way: str, build: Callable[[], nn.Module]) -> None:
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
