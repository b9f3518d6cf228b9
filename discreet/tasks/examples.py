"""Values that every data set becomes: a table of examples, and a task of training and test examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Examples:
    """One table of examples; row i of `inputs` belongs to entry i of `targets`.

    inputs: (n, *input_shape), float32, or int64 token ids for text. targets: (n,), int64 class numbers.
    n may be 0. Raises ValueError if the lengths or the types do not fit.

    >>> table = Examples(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    >>> len(table), len(table.subset(torch.tensor([2])))
    (3, 1)
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def __post_init__(self) -> None:
        if self.inputs.dtype not in (torch.float32, torch.int64):
            raise ValueError(f"inputs must be float32 or int64, not {self.inputs.dtype}")
        if self.targets.dtype != torch.int64 or self.targets.ndim != 1:
            shape = tuple(self.targets.shape)
            raise ValueError(f"targets must be int64 of shape (n,), not {self.targets.dtype} of shape {shape}")
        if self.inputs.ndim < 1 or len(self.inputs) != len(self.targets):
            raise ValueError(f"{tuple(self.inputs.shape)} inputs do not fit {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, indices: torch.Tensor) -> Examples:
        """The rows at `indices`, (m,) int64, in that order; a copy. Empty indices give an empty table."""
        return Examples(self.inputs[indices], self.targets[indices])


@dataclass(frozen=True)
class TaskShape:
    """What a task expects of an example.

    Attributes:
      input_shape: of one input, without the batch.
      num_classes: targets lie in [0, num_classes).
      scale: the range of inputs that are numbers.
      tokens: inputs are whole numbers in [0, num_classes), as in text.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    scale: tuple[float, float] = (0.0, 1.0)
    tokens: bool = False


# Known without loading the data: a node with data of its own does not have them.
SHAPES = {
    "digits": TaskShape((1, 8, 8), 10),
    "breast_cancer": TaskShape((30,), 2, scale=(-1.0, 1.0)),
    "mnist": TaskShape((1, 28, 28), 10),
    "fashion_mnist": TaskShape((1, 28, 28), 10),
    "cifar10": TaskShape((3, 32, 32), 10),
    "femnist": TaskShape((1, 28, 28), 62),
    "shakespeare": TaskShape((80,), 98, tokens=True),
}


@dataclass(frozen=True, eq=False)
class Task:
    """A data set ready to be learned: what the clients hold, and the public test set that the server holds.

    num_classes, input_shape: as in `TaskShape`. owners: (len(train),) int64, the natural user of each training example,
    numbered from 0, or None if the data have no natural users. Raises ValueError if the parts do not fit.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    input_shape: tuple[int, ...]
    owners: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for part, table in (("train", self.train), ("test", self.test)):
            self._check_table(part, table)
        if self.owners is not None and self.owners.shape != (len(self.train),):
            raise ValueError(f"{self.name}: owners must be one per training example, not {tuple(self.owners.shape)}")

    def _check_table(self, part: str, table: Examples) -> None:
        if len(table) == 0:
            raise ValueError(f"{self.name}: the {part} set is empty")
        if tuple(table.inputs.shape[1:]) != self.input_shape:
            shape = tuple(table.inputs.shape[1:])
            raise ValueError(f"{self.name}: {part} inputs have shape {shape}, not {self.input_shape}")
        low, high = int(table.targets.min()), int(table.targets.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(f"{self.name}: {part} targets lie in [{low}, {high}], not in [0, {self.num_classes})")


def task_of(name: str, train: Examples, test: Examples, owners: torch.Tensor | None = None) -> Task:
    """The task of a data set of `SHAPES`."""
    return Task(name, train, test, SHAPES[name].num_classes, SHAPES[name].input_shape, owners)
