"""Shapes that rise or fall, as data.toml wants: the projection of a trained linear model.

It uses the released parameters and public facts alone, so it costs no epsilon.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from discreet.data.columns import Column
from discreet.data.encoding import encoded_columns
from discreet.data.examples import Task
from discreet.data.targets import CLASSES, Array
from discreet.models.models import flatten_parameters
from discreet.planning.plan import Plan
from discreet.run_files.shapes import cells_of, moved_words, site_free
from discreet.server.model_shapes import shapes_of_run
from discreet.server.table_rule import LINEAR
from discreet.settings.data import NormaliserConfig
from discreet.settings.rules import ConfigError

# At which a shape may not fall. Between two of these it falls by at most 7e-5 of its span, by
# Bernstein's inequality for 20 curves: (20 + 1) ** 2 * (pi / 2000) ** 2 / 16.
PLACES = 2001
TINY = 1e-6  # of weights that no place tells apart, as of curves in a range of few days

logger = logging.getLogger("discreet")


def check_rising(name: str, task: Task) -> None:
    """Raises ConfigError if a column must rise or fall, and the model has no shapes to project."""
    wanted = [column.name for column, _ in _wanted(task)]
    several = task.shape.target.kind == CLASSES and task.shape.num_outputs != 2
    if wanted and (name not in LINEAR or several):
        raise ConfigError(
            f"columns: {wanted[0]} can rise or fall only in a linear model of numbers, labels or "
            f"two classes, such as model.name=logistic_regression (got {name})"
        )


def rising_shapes(task: Task, plan: Plan, model: nn.Module, rounds: int) -> dict[str, Any] | None:
    """The content of shapes.json, after the model has been projected in place. A shape that had to
    rise or fall says so, and how far it was moved at most."""
    before = shapes_of_run(task, plan, model, rounds)
    columns = {column.name: column for column, _ in _wanted(task)}
    finite = flatten_parameters(model).isfinite().all()
    if before is None or not columns or not finite:  # a model that diverged has no nearest shape
        return before
    project(model, task, plan.run.normaliser)
    after = shapes_of_run(task, plan, model, rounds)
    assert after is not None
    for old, new in zip(before["shapes"], after["shapes"], strict=True):
        column = columns.get(new["columns"][0])
        if column is not None:
            moved = np.abs(np.array(new["effect"]) - np.array(old["effect"])).max()
            new |= {"way": "rise" if column.rises else "fall", "moved": round(float(moved), 6)}
            logger.info("%s", moved_words(new))
    return after


@torch.no_grad()
def project(model: nn.Module, task: Task, by: NormaliserConfig) -> None:
    """Changes the weights of a linear model so that its shapes rise or fall where they must.

    Each shape becomes the nearest such shape in least squares over the column's range. The outputs
    of two classes move by equal and opposite amounts.
    """
    (layer,) = (each for each in model.modules() if isinstance(each, nn.Linear))
    weight = layer.weight.double().cpu().numpy().copy()
    deviations = np.ones(weight.shape[1]) if by.deviations is None else np.array(by.deviations)
    means = np.zeros(weight.shape[1]) if by.means is None else np.array(by.means)
    raw = weight / deviations
    if task.shape.target.kind == CLASSES:
        signs = np.array([[-1.0, 1.0]])
    else:
        signs = np.eye(len(raw))
    moves = np.zeros_like(raw)
    levels = np.zeros(len(raw))
    for column, start in _wanted(task):
        encoded, lengths = _encoded(column)
        inputs = slice(start, start + encoded.shape[1] - 1)
        for sign in signs:
            own = np.append(sign @ raw[:, inputs], 0)
            moved = projected(encoded, own, 1 if column.rises else -1, lengths) - own
            shares = sign / (sign @ sign)
            moves[:, inputs] += np.outer(shares, moved[:-1])
            levels += shares * moved[-1]
    layer.weight.add_(torch.from_numpy(moves * deviations).to(layer.weight))
    layer.bias.add_(torch.from_numpy(moves @ means + levels).to(layer.bias))


def projected(encoded: Array, weights: Array, way: int, lengths: Array | float = 1.0) -> Array:
    """The weights (inputs,) whose shape `encoded @ weights` never falls (`way` 1) or never rises
    (-1), nearest to the given ones' by the sum of squares over the places, each of which counts by
    its length.

    It is the projection on a cone, whose dual is a least-squares problem with nonnegative numbers.
    """
    steps = way * np.diff(encoded, axis=0)
    if (steps @ weights >= 0).all():
        return weights
    ridge = TINY * np.eye(encoded.shape[1])
    counted = encoded * np.sqrt(lengths).reshape(-1, 1)
    root: Array = np.linalg.qr(np.vstack([counted, ridge])).R
    bounds = np.linalg.solve(root.T, steps[(steps != 0).any(axis=1)].T)
    bounds /= np.linalg.norm(bounds, axis=0)
    start = root @ weights
    pushes, _ = nnls(bounds, -start)
    found: Array = np.linalg.solve(root, start + bounds @ pushes)
    return found


def _encoded(column: Column) -> tuple[Array, Array]:
    """A column's encoding at many places of its range, in order, and the intercept's 1, so that a
    shape keeps its mean over the range; and the length of each place, of mean 1.

    The places are the denser the nearer to an end, where Chebyshev polynomials are steep.
    """
    shares = (1 - np.cos(np.linspace(0, np.pi, PLACES))) / 2
    cells = [cell for _, cell in cells_of(column, shares, flags=False)]
    encoded = encoded_columns({column.name: cells}, [site_free(column)])
    if column.bins:
        lengths = np.ones(len(encoded))
    else:
        lengths = np.gradient(encoded[:, 0])
    return np.column_stack([encoded, np.ones(len(encoded))]), lengths / lengths.mean()


def _wanted(task: Task) -> Iterator[tuple[Column, int]]:
    """The columns that must rise or fall, each with its first input."""
    start = 0
    for column in task.description.columns if task.description is not None else ():
        if column.rises or column.falls:
            yield column, start
        start += len(column.outputs)
