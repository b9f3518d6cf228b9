"""Inputs as a model reads them, if a run normalises them by means and deviations of their columns or channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from discreet.tasks.examples import Examples, Task


@dataclass(frozen=True)
class Normaliser:
    """What inputs are normalised by: (input - mean) / deviation, of each column of a table or channel of images."""

    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()

    def inputs(self, inputs: Tensor) -> Tensor:
        """Inputs (n, columns) or (n, channels, height, width), float32, normalised. Nothing is done without means.

        Raises:
          ValueError: there are not as many columns as means.

        >>> Normaliser((1.0, 50.0), (2.0, 10.0)).inputs(torch.tensor([[5.0, 40.0]])).tolist()
        [[2.0, -1.0]]
        """
        if not self.means:
            return inputs
        if inputs.ndim not in (2, 4) or inputs.shape[1] != len(self.means):
            raise ValueError(f"normaliser.means are {len(self.means)}, for inputs of shape {tuple(inputs.shape[1:])}")
        means, deviations = (self._column(values, inputs.ndim) for values in (self.means, self.deviations))
        return ((inputs.double() - means) / deviations).float()

    def examples(self, examples: Examples) -> Examples:
        """Examples with their inputs normalised."""
        return Examples(self.inputs(examples.inputs), examples.targets) if self.means else examples

    def task(self, task: Task) -> Task:
        """A task with all its inputs normalised."""
        return replace(task, train=self.examples(task.train), test=self.examples(task.test)) if self.means else task

    def _column(self, values: Sequence[float], ndim: int) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).reshape(-1, *(1,) * (ndim - 2))


def normaliser_of(means: Sequence[float] | None, deviations: Sequence[float] | None) -> Normaliser:
    """Of settings: None for none."""
    return Normaliser(tuple(means or ()), tuple(deviations or ()))
