"""Steps of DP-SGD by Opacus, in each of its modes; imported only where Opacus is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.people_models import Case

OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")
CLIP, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.1, 1e-3  # of every private step that is compared


class Step(NamedTuple):
    """A training step, what lets go of the gradients that it leaves, and what draws its batch."""

    take: Callable[[], object]
    clear: Callable[[], None]
    draw: Callable[[], object] = tuple


@dataclass
class _Criterion:
    """A loss of one value an example, as Opacus wants it: its mean, unless `reduction` says "none"."""

    loss: Callable[[Any, Any], Tensor]
    reduction: str = "mean"

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        losses = self.loss(outputs, targets)
        return losses if self.reduction == "none" else losses.mean()


def opacus_step(mode: str, case: Case) -> Step:
    """One step as Opacus documents it, on the case's batch, with what its `get_compatible_module` makes of the model:
    its own attention and recurrent layers in place of PyTorch's."""
    engine, count = import_module("opacus").PrivacyEngine(), len(case.targets)
    model = engine.get_compatible_module(case.model)
    for layer in model.modules():  # in-place activations break its hooks, so they are switched off for it
        layer.__dict__.update({"inplace": False} if getattr(layer, "inplace", False) else {})
    trained = [value for value in model.parameters() if value.requires_grad]
    wrapped, optimizer, *more = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=LEARNING_RATE),
        criterion=_Criterion(case.loss),
        data_loader=DataLoader(TensorDataset(torch.zeros(count)), batch_size=count),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        batch_first=case.batch_first,
        grad_sample_mode=mode,
    )
    criterion = more[0] if mode == "ghost" else _Criterion(case.loss)

    def step() -> None:
        optimizer.zero_grad()
        criterion(case.outputs(wrapped), case.targets).backward()
        optimizer.step()

    return Step(step, optimizer.zero_grad)
