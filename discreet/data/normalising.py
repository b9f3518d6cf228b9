"""Inputs as a model reads them, if a run normalises them by means and deviations of their columns or channels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from discreet.data.examples import Examples, Task
from discreet.settings.data import NormaliserConfig


@dataclass(frozen=True)
class Normaliser:
    """Normalises inputs: (input - mean) / deviation, of each column of a table or channel of images. Without means it
    leaves them as they are."""

    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()

    def inputs(self, inputs: Tensor) -> Tensor:
        """Inputs (n, columns) or (n, channels, height, width), float32, normalised. Raises ValueError if there are not
        as many columns as means.

        >>> Normaliser((1.0, 50.0), (2.0, 10.0)).inputs(torch.tensor([[5.0, 40.0]])).tolist()
        [[2.0, -1.0]]
        """
        if not self.means:
            return inputs
        if inputs.ndim not in (2, 4) or inputs.shape[1] != len(self.means):
            raise ValueError(f"normaliser.means are {len(self.means)}, for inputs of shape {tuple(inputs.shape[1:])}")
        pairs = torch.tensor((self.means, self.deviations), dtype=torch.float64)
        means, deviations = pairs.reshape(2, -1, *(1,) * (inputs.ndim - 2))
        normalised: Tensor = (inputs.double() - means) / deviations
        return normalised.float()

    def examples(self, examples: Examples) -> Examples:
        """Examples with their inputs normalised."""
        return Examples(self.inputs(examples.inputs), examples.targets) if self.means else examples

    def task(self, task: Task) -> Task:
        """A task with all its inputs normalised."""
        return replace(task, train=self.examples(task.train), test=self.examples(task.test)) if self.means else task


def normaliser_of(config: NormaliserConfig) -> Normaliser:
    """The normaliser of settings."""
    return Normaliser(tuple(config.means or ()), tuple(config.deviations or ()))
