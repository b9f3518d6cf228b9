"""Poisson batches of a data set: each example is in, or not, independently of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from discreet.privacy.randomness import RandomSource
from discreet.training.local_training import step_batch

Collate = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """What PyTorch calls a map-style data set; a list of (input, target) is one too."""

    def __len__(self) -> int:
        """How many examples there are."""

    def __getitem__(self, index: int, /) -> Any:
        """One example: an input and a target."""


def size_of(dataset: MapDataset) -> int:
    """How many examples there are.

    Raises:
      ValueError: none, or the data set does not say.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            "dataset must be map-style, with len(dataset) and dataset[index]: Poisson batches pick examples"
        )
    if len(dataset) < 1:
        raise ValueError("dataset must have an example at least")
    return len(dataset)


@dataclass(frozen=True, eq=False)
class PoissonBatches:
    """Batches of (inputs, targets), tensors on `device` with the examples in their first dimension.

    An example is in a batch with `probability`, independently of the others and of earlier batches. So a batch may have
    any size, 0 included. `collate` makes a batch of a list of examples; PyTorch's default_collate if it is None.
    """

    dataset: MapDataset
    probability: float
    collate: Collate | None
    device: torch.device
    source: RandomSource

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step. It is drawn anew if the source is secure: ask once.

        Raises:
          ValueError: the examples are not pairs, or collate does not give one row an example.
        """
        drawn = step_batch(self.source, step, len(self.dataset), probability=self.probability)
        inputs, targets = (part.to(self.device) for part in self._pair(drawn))
        return inputs, targets

    def _pair(self, positions: Tensor) -> Sequence[Tensor]:
        if isinstance(self.dataset, TensorDataset) and self.collate is None:
            return _checked([part[positions.to(part.device)] for part in self.dataset.tensors], len(positions))
        collate = default_collate if self.collate is None else self.collate
        if len(positions):
            return _checked(collate([self.dataset[position] for position in positions.tolist()]), len(positions))
        # Shapes and types of an empty batch are those of a batch of one.
        return [part[:0] for part in _checked(collate([self.dataset[0]]), 1)]


def _checked(parts: Any, count: int) -> Sequence[Tensor]:
    if not isinstance(parts, tuple | list) or len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        raise ValueError("dataset: an example must be a pair, an input and a target, that collate_fn makes tensors of")
    if any(part.dim() == 0 or len(part) != count for part in parts):
        shapes = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"collate_fn: a batch of {count} examples must have as many rows, not shapes {shapes}")
    return parts
