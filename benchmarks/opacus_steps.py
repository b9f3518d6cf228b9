"""Steps of DP-SGD by Opacus, in its three modes; imported only where Opacus is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OPACUS_MODES = ("hooks", "functorch", "ghost")


def opacus_step(
    mode: str, model: nn.Module, batch: tuple[Tensor, Tensor], *, settings: dict[str, float]
) -> Callable[[], None]:
    """One step as Opacus documents it, on (inputs, targets); settings: clip, noise_multiplier, learning_rate."""
    inputs, targets = batch
    optimizers = importlib.import_module("opacus.optimizers")
    kind = "DPOptimizerFastGradientClipping" if mode == "ghost" else "DPOptimizer"
    optimizer = getattr(optimizers, kind)(
        torch.optim.SGD(model.parameters(), lr=settings["learning_rate"]),
        noise_multiplier=settings["noise_multiplier"],
        max_grad_norm=settings["clip"],
        expected_batch_size=len(inputs),
    )
    sampled, criterion = _wrapped(mode, model, optimizer, settings["clip"])

    def step() -> None:
        optimizer.zero_grad()
        criterion(sampled(inputs), targets).backward()
        optimizer.step()

    return step


def fixed_for_opacus(model: nn.Module) -> nn.Module:
    """The model with Opacus' layers in place of those of PyTorch that it does not know: attention, for one."""
    fixed: nn.Module = importlib.import_module("opacus.validators").ModuleValidator.fix(model)
    return fixed


def _wrapped(mode: str, model: nn.Module, optimizer: Any, clip: float) -> tuple[Any, Any]:
    """The model that keeps per-example gradients or norms, and the loss that goes with it."""
    criterion = nn.CrossEntropyLoss()
    if mode != "ghost":
        samples = importlib.import_module("opacus.grad_sample")
        return samples.GradSampleModule(model, force_functorch=mode == "functorch"), criterion
    clipping = importlib.import_module("opacus.grad_sample.grad_sample_module_fast_gradient_clipping")
    losses = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
    sampled = clipping.GradSampleModuleFastGradientClipping(model, max_grad_norm=clip, use_ghost_clipping=True)
    return sampled, losses.DPLossFastGradientClipping(sampled, optimizer, criterion)
