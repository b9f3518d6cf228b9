"""Inputs as a model reads them, if a run normalises them by means and deviations of their columns or channels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from discreet.data.examples import Examples, Task
from discreet.settings.data import NormaliserConfig


def normalised_inputs(inputs: Tensor, by: NormaliserConfig) -> Tensor:
    """Inputs (n, columns) or (n, channels, height, width), float32: (input - mean) / deviation, of each column or
    channel; without means as they are. Raises ValueError if there are not as many columns as means.

    >>> normalised_inputs(torch.tensor([[5.0, 40.0]]), NormaliserConfig([1.0, 50.0], [2.0, 10.0])).tolist()
    [[2.0, -1.0]]
    """
    if not by.means:
        return inputs
    if inputs.ndim not in (2, 4) or inputs.shape[1] != len(by.means):
        raise ValueError(f"normaliser.means are {len(by.means)}, for inputs of shape {tuple(inputs.shape[1:])}")
    pairs = torch.tensor((by.means, by.deviations), dtype=torch.float64)
    means, deviations = pairs.reshape(2, -1, *(1,) * (inputs.ndim - 2))
    normalised: Tensor = (inputs.double() - means) / deviations
    return normalised.float()


def normalised_examples(examples: Examples, by: NormaliserConfig) -> Examples:
    """Examples with their inputs normalised."""
    return Examples(normalised_inputs(examples.inputs, by), examples.targets) if by.means else examples


def normalised_task(task: Task, by: NormaliserConfig) -> Task:
    """A task with all its inputs normalised."""
    train, test = (normalised_examples(examples, by) for examples in (task.train, task.test))
    return replace(task, train=train, test=test) if by.means else task
