"""The shapes of a run's last model, with the noise that its plan expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from discreet.data.examples import Task
from discreet.planning.linear_outlook import parameter_noise
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerSGD
from discreet.run_files.shapes import LinearWeights, shapes_of
from discreet.server.table_rule import LINEAR
from discreet.settings.privacy import CORRELATED, USER


def shapes_of_run(
    task: Task, plan: Plan, tensors: Mapping[str, Tensor], rounds: int
) -> dict[str, Any] | None:
    """The content of shapes.json after so many rounds; None unless the model is linear, of a table
    with described columns."""
    described = task.description
    if plan.settings.model.name not in LINEAR or described is None or not described.columns:
        return None
    bias, weight = sorted((each.double().numpy() for each in tensors.values()), key=np.ndim)
    by = plan.run.normaliser
    if by.means and by.deviations:
        weight = weight / np.array(by.deviations)
        bias = bias - weight @ np.array(by.means)
    target = task.shape.target
    stddev = None if by.means else _noise(plan, rounds)
    model = LinearWeights(weight, bias, stddev, target, described.classes)
    return shapes_of(model, described)


def _noise(plan: Plan, rounds: int) -> float | None:
    """The deviation of each parameter by noise alone; None if the noise follows the data, or is the
    clients' own."""
    optimizer = plan.optimizer
    user = plan.run.user
    independent = user.mechanism is None and user.mechanism_kind != CORRELATED
    known = USER in plan.mechanisms and plan.clip.kind == "fixed" and independent
    if not known or not isinstance(optimizer, ServerSGD) or optimizer.shrink_with_noise:
        return None
    return parameter_noise(plan, optimizer, rounds)
