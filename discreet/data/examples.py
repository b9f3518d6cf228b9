"""The values that every data set becomes: a table of examples, and a task of training and test
examples. Also normalises their inputs if a run does so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from discreet.data.targets import CLASS, LABELS, NUMBERS, SEQUENCES, Array, Target
from discreet.per_example.objective import PADDING
from discreet.privacy.private import Private
from discreet.settings.data import NormaliserConfig

if TYPE_CHECKING:
    from discreet.data.description import DataDescription

# types of targets, and their numbers of dimensions
_TARGETS = (
    (torch.int64, 1),
    (torch.int64, 2),
    (torch.float32, 2),
)


@dataclass(frozen=True, eq=False, repr=False)
class Examples(Private):
    """One table of examples; row i of `inputs` belongs to entry i of `targets`.

    inputs: (n, *input_shape), float32, or int64 token ids for text. targets: (n,), int64 class
    numbers; (n, length), int64 class numbers of sequences, -100 (`PADDING`) where a position does
    not count; or (n, k), float32: k labels that are 0 or 1, or k numbers. n may be 0. owners: (n,),
    int64, the number of each row's owner, from 0; None if unknown. Raises ValueError if lengths or
    types do not fit.

    >>> table = Examples(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    >>> len(table), len(table.subset(torch.tensor([2])))
    (3, 1)
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype not in (torch.float32, torch.int64):
            raise ValueError(f"inputs must be float32 or int64, not {self.inputs.dtype}")
        if (self.targets.dtype, self.targets.ndim) not in _TARGETS:
            found = f"{self.targets.dtype} of shape {tuple(self.targets.shape)}"
            raise ValueError(
                "targets must be int64 of shape (n,) or (n, k), or float32 of shape "
                f"(n, k), not {found}"
            )
        if self.inputs.ndim < 1 or len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{tuple(self.inputs.shape)} inputs do not fit {len(self.targets)} targets"
            )
        if self.owners is not None and self.owners.shape != (len(self.targets),):
            shape = tuple(self.owners.shape)
            raise ValueError(f"owners must be one per row, {len(self)} in all, not {shape}")

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, indices: torch.Tensor) -> Examples:
        """The rows at `indices`, (m,) int64, in that order, as a copy. Empty indices give an empty
        table."""
        if self.owners is None:
            owners = None
        else:
            owners = self.owners[indices]
        return Examples(self.inputs[indices], self.targets[indices], owners)


def concatenated(tables: Sequence[Examples], owners: torch.Tensor | None = None) -> Examples:
    """Two tables in order, with these owners."""
    return Examples(
        torch.cat([table.inputs for table in tables]),
        torch.cat([table.targets for table in tables]),
        owners,
    )


def to_unit_box(features: Array, ranges: Sequence[tuple[float, float]]) -> Array:
    """Maps features (n, k) to [-1, 1] by a public range (low, high) of each. Values outside are
    clamped, and NaN stays NaN. A range computed from the data would be an unaccounted release."""
    low, high = np.asarray(ranges).T
    return np.clip((features - low) / (high - low) * 2 - 1, -1, 1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TaskShape:
    """The shape of a task's examples.

    Attributes:
      input_shape: the shape of one input, without the batch dimension.
      num_classes: targets that are classes lie in [0, num_classes); 0 if labels or numbers are
        predicted.
      scale: the range of inputs that are numbers.
      num_tokens: inputs are integers in [0, num_tokens), as in text; 0 for other inputs.
      target: the target of predictions.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    scale: tuple[float, float] = (0.0, 1.0)
    num_tokens: int = 0
    target: Target = CLASS

    @property
    def num_outputs(self) -> int:
        """The count of a model's outputs for an example, or for each position of a sequence: a
        logit for each class or label, or the numbers."""
        return self.num_classes or len(self.target.names)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a model's output for an example: (num_outputs,), or (num_classes, length)
        for sequences."""
        return (self.num_outputs, *((self.target.length,) if self.target.length else ()))


# Known without loading the data, which a node with its own data does not have.
SHAPES = {
    "digits": TaskShape((1, 8, 8), 10),
    "breast_cancer": TaskShape((30,), 2, scale=(-1.0, 1.0)),
    "mnist": TaskShape((1, 28, 28), 10),
    "fashion_mnist": TaskShape((1, 28, 28), 10),
    "cifar10": TaskShape((3, 32, 32), 10),
    "femnist": TaskShape((1, 28, 28), 62),
    "shakespeare": TaskShape((80,), 98, num_tokens=98),
    "diabetes": TaskShape(
        (10,), 0, scale=(-1.0, 1.0), target=Target(NUMBERS, ("progression",), (0.0,), (400.0,))
    ),
    "heart": TaskShape((13,), 2, scale=(-1.0, 1.0)),
    "multilabel": TaskShape(
        (20,), 0, target=Target(LABELS, tuple(f"topic{number}" for number in range(5)))
    ),
}


@dataclass(frozen=True, eq=False)
class Task:
    """A data set that is ready for training: the clients' examples, and the server's public test
    set, which may be empty.

    description, folder: the data.toml of a folder, and the folder. ValueError: the train set is
    empty, inputs have another shape, a class is out of range, or the whole test set is padding.
    """

    name: str
    train: Examples
    test: Examples
    shape: TaskShape
    description: DataDescription | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if len(self.train) == 0:
            raise ValueError(f"{self.name}: the train set is empty")
        for part, table in (("train", self.train), ("test", self.test)):
            shape = tuple(table.inputs.shape[1:])
            if shape != self.shape.input_shape:
                raise ValueError(
                    f"{self.name}: {part} inputs have shape {shape}, not {self.shape.input_shape}"
                )
            if self.shape.num_classes:
                self._check_classes(part, table.targets)

    @property
    def owners(self) -> torch.Tensor | None:
        """The natural owner of each training example, if the data have owners."""
        return self.train.owners

    def _check_classes(self, part: str, targets: torch.Tensor) -> None:
        if self.shape.target.kind == SEQUENCES:
            counted = targets[targets != PADDING]
        else:
            counted = targets
        if len(targets) and not len(counted) and part == "test":
            raise ValueError(f"{self.name}: all targets of the test set are padding")
        if (
            len(counted)
            and not 0 <= int(counted.min()) <= int(counted.max()) < self.shape.num_classes
        ):
            between = (
                f"[{int(counted.min())}, {int(counted.max())}], not in [0, "
                f"{self.shape.num_classes})"
            )
            raise ValueError(f"{self.name}: {part} targets lie in {between}")


def normalised_inputs(inputs: Tensor, by: NormaliserConfig) -> Tensor:
    """Inputs (n, columns) or (n, channels, height, width), float32: (input - mean) / deviation, of
    each column or channel; without means unchanged. ValueError: the numbers of columns and of means
    differ.

    >>> config = NormaliserConfig([1.0, 50.0], [2.0, 10.0])
    >>> normalised_inputs(torch.tensor([[5.0, 40.0]]), config).tolist()
    [[2.0, -1.0]]
    """
    if not by.means:
        return inputs
    if inputs.ndim not in (2, 4) or inputs.shape[1] != len(by.means):
        raise ValueError(
            f"normaliser.means are {len(by.means)}, for inputs of shape {tuple(inputs.shape[1:])}"
        )
    pairs = torch.tensor((by.means, by.deviations), dtype=torch.float64)
    means, deviations = pairs.reshape(2, -1, *(1,) * (inputs.ndim - 2))
    normalised: Tensor = (inputs.double() - means) / deviations
    return normalised.float()


def normalised_examples(examples: Examples, by: NormaliserConfig) -> Examples:
    """Examples with their inputs normalised."""
    if by.means:
        return replace(examples, inputs=normalised_inputs(examples.inputs, by))
    return examples


def normalised_task(task: Task, by: NormaliserConfig) -> Task:
    """A task with all its inputs normalised."""
    if not by.means:
        return task
    train, test = (normalised_examples(examples, by) for examples in (task.train, task.test))
    return replace(task, train=train, test=test)
