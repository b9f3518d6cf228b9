"""Values that every data set becomes: a table of examples, and a task of training and test examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from discreet.privacy.rules.objective import PADDING
from discreet.tasks.targets import CLASS, LABELS, NUMBERS, SEQUENCES, Target

_TARGETS = ((torch.int64, 1), (torch.int64, 2), (torch.float32, 2))  # types of targets and how many dimensions


@dataclass(frozen=True, eq=False)
class Examples:
    """One table of examples; row i of `inputs` belongs to entry i of `targets`.

    inputs: (n, *input_shape), float32, or int64 token ids for text. targets: (n,), int64 class numbers; (n, length),
    int64 class numbers of sequences, -100 (`PADDING`) where a position does not count; or (n, k), float32: k labels
    that are 0 or 1, or k numbers. n may be 0. Raises ValueError if lengths or types do not fit.

    >>> table = Examples(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    >>> len(table), len(table.subset(torch.tensor([2])))
    (3, 1)
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def __post_init__(self) -> None:
        if self.inputs.dtype not in (torch.float32, torch.int64):
            raise ValueError(f"inputs must be float32 or int64, not {self.inputs.dtype}")
        if (self.targets.dtype, self.targets.ndim) not in _TARGETS:
            found = f"{self.targets.dtype} of shape {tuple(self.targets.shape)}"
            raise ValueError(f"targets must be int64 of shape (n,) or (n, k), or float32 of shape (n, k), not {found}")
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
      num_classes: targets that are classes lie in [0, num_classes); 0 if labels or numbers are predicted.
      scale: the range of inputs that are numbers.
      num_tokens: inputs are whole numbers in [0, num_tokens), as in text; 0 if they are other numbers.
      target: what is predicted.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    scale: tuple[float, float] = (0.0, 1.0)
    num_tokens: int = 0
    target: Target = CLASS

    @property
    def num_outputs(self) -> int:
        """How many numbers a model gives for an example, or for each position of a sequence: a logit for each class or
        label, or the numbers."""
        return self.num_classes or len(self.target.names)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of what a model gives for an example: (num_outputs,), or (num_classes, length) for sequences."""
        return (self.num_outputs, *((self.target.length,) if self.target.length else ()))


# Known without loading the data: a node with data of its own does not have them.
SHAPES = {
    "digits": TaskShape((1, 8, 8), 10),
    "breast_cancer": TaskShape((30,), 2, scale=(-1.0, 1.0)),
    "mnist": TaskShape((1, 28, 28), 10),
    "fashion_mnist": TaskShape((1, 28, 28), 10),
    "cifar10": TaskShape((3, 32, 32), 10),
    "femnist": TaskShape((1, 28, 28), 62),
    "shakespeare": TaskShape((80,), 98, num_tokens=98),
    "diabetes": TaskShape((10,), 0, scale=(-1.0, 1.0), target=Target(NUMBERS, ("progression",), (0.0,), (400.0,))),
    "heart": TaskShape((13,), 2, scale=(-1.0, 1.0)),
    "multilabel": TaskShape((20,), 0, target=Target(LABELS, tuple(f"topic{number}" for number in range(5)))),
}


@dataclass(frozen=True, eq=False)
class Task:
    """A data set ready to be learned: what the clients hold, and the public test set that the server holds; it is empty
    if there is none.

    num_classes, input_shape, target, num_tokens: as in `TaskShape`. owners: (len(train),) int64, the natural user of
    each training example, numbered from 0, or None if the data have no natural users. Raises ValueError if the parts
    do not fit.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    input_shape: tuple[int, ...]
    owners: torch.Tensor | None = None
    target: Target = CLASS
    num_tokens: int = 0

    def __post_init__(self) -> None:
        for part, table in (("train", self.train), ("test", self.test)):
            self._check_table(part, table)
        if self.owners is not None and self.owners.shape != (len(self.train),):
            raise ValueError(f"{self.name}: owners must be one per training example, not {tuple(self.owners.shape)}")

    def _check_table(self, part: str, table: Examples) -> None:
        if len(table) == 0 and part == "train":
            raise ValueError(f"{self.name}: the train set is empty")
        if tuple(table.inputs.shape[1:]) != self.input_shape:
            shape = tuple(table.inputs.shape[1:])
            raise ValueError(f"{self.name}: {part} inputs have shape {shape}, not {self.input_shape}")
        if len(table) == 0:
            return
        if self.target.kind in (LABELS, NUMBERS):
            self._check_columns(part, table)
            return
        if tuple(table.targets.shape[1:]) != self.output_shape[1:]:
            wanted = ", ".join(map(str, ("n", *self.output_shape[1:])))
            raise ValueError(f"{self.name}: {part} targets must be {self.target.kind}, of shape ({wanted})")
        self._check_classes(part, table.targets)

    def _check_classes(self, part: str, targets: torch.Tensor) -> None:
        if self.target.kind == SEQUENCES:
            targets = targets[targets != PADDING]
            if len(targets) == 0 and part == "test":
                raise ValueError(f"{self.name}: all targets of the test set are padding")
        if len(targets) == 0:
            return
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(f"{self.name}: {part} targets lie in [{low}, {high}], not in [0, {self.num_classes})")

    def _check_columns(self, part: str, table: Examples) -> None:
        """Labels and numbers are columns."""
        kind, wanted = self.target.kind, (len(table), len(self.target.names))
        if self.num_classes or tuple(table.targets.shape) != wanted:
            shape = tuple(table.targets.shape)
            raise ValueError(
                f"{self.name}: {part} targets must be {kind} of shape {wanted}, not {shape}, and no classes"
            )
        if not torch.isfinite(table.targets).all():
            raise ValueError(f"{self.name}: a {part} target is NaN or infinite")
        if kind == LABELS and not ((table.targets == 0) | (table.targets == 1)).all():
            raise ValueError(f"{self.name}: {part} labels must be 0 or 1")

    @property
    def num_outputs(self) -> int:
        """As in `TaskShape`."""
        return self.num_classes or len(self.target.names)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """As in `TaskShape`."""
        return (self.num_outputs, *((self.target.length,) if self.target.length else ()))

    @property
    def shape(self) -> TaskShape:
        """What an example is; of data that are not in `SHAPES` without the range of inputs."""
        scale = SHAPES[self.name].scale if self.name in SHAPES else (0.0, 1.0)
        return TaskShape(self.input_shape, self.num_classes, scale, self.num_tokens, self.target)


def task_of(name: str, train: Examples, test: Examples, owners: torch.Tensor | None = None) -> Task:
    """The task of a data set of `SHAPES`."""
    shape = SHAPES[name]
    return Task(name, train, test, shape.num_classes, shape.input_shape, owners, shape.target, shape.num_tokens)
