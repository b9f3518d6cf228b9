"""Values that every data set becomes: a table of examples, and a task of training and test examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Examples:
    """One table of examples; row i of `inputs` belongs to entry i of `targets`.

    inputs: (n, *input_shape), float32, or int64 token ids for text. targets: (n,), int64 class numbers.
    n may be 0. Raises ValueError where the lengths or the types do not fit.

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


@dataclass(frozen=True, eq=False)
class Task:
    """A data set ready to be learned: what the clients hold, and the public test set that the server holds.

    num_classes: targets lie in [0, num_classes). input_shape: the shape of one input, without the batch.
    owners: (len(train),) int64, the natural user of each training example, numbered from 0, or None where the
    data has no natural users. Raises ValueError where the parts do not fit.
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
