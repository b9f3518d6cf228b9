"""The shapes of a run's last model, with the noise that its plan expects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from discreet.data.examples import Task
from discreet.models.models import outputs_of
from discreet.planning.linear_outlook import parameter_noise
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerSGD
from discreet.run_files.shapes import LinearWeights, shapes_of
from discreet.server.table_rule import LINEAR
from discreet.settings.adjacency import USER
from discreet.settings.privacy import CORRELATED
from discreet.settings.training import LEAST_SQUARES


def shapes_of_run(task: Task, plan: Plan, model: nn.Module, rounds: int) -> dict[str, Any] | None:
    """The content of shapes.json of a model after so many rounds; None unless it is linear, of a
    table with described columns."""
    described = task.description
    known = (*LINEAR, LEAST_SQUARES)
    if plan.model.name not in known or described is None or not described.columns:
        return None
    size = task.shape.input_shape[0]
    outputs = outputs_of(model, torch.cat([torch.zeros(1, size), torch.eye(size)])).double().numpy()
    bias = outputs[0]
    weight = (outputs[1:] - bias).T
    by = plan.run.normaliser
    if by.means and by.deviations:
        weight = weight / np.array(by.deviations)
        bias = bias - weight @ np.array(by.means)
    target = task.shape.target
    stddev = None if by.means else _noise(plan, rounds)
    weights = LinearWeights(weight, bias, stddev, target, described.classes)
    return shapes_of(weights, described)


def _noise(plan: Plan, rounds: int) -> float | None:
    """The deviation of each parameter by noise alone; None if the noise follows the data, or is the
    clients' own."""
    optimizer = plan.optimizer
    user = plan.run.user
    independent = user.mechanism is None and user.mechanism_kind != CORRELATED
    sums = plan.model.name == LEAST_SQUARES
    known = USER in plan.mechanisms and plan.clip.kind == "fixed" and independent and not sums
    if not known or not isinstance(optimizer, ServerSGD) or optimizer.shrink_with_noise:
        return None
    return parameter_noise(plan, optimizer, rounds)
