"""The data set that all virtual clients are views of, held once on the device that computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from discreet.tasks.examples import Examples

WHITE = 255
PIECE = 512


@dataclass(frozen=True, eq=False)
class Resident:
    """Examples; `inputs` that are whole 255ths, as images are, stand as bytes: a fourth of the memory to read.

    Attributes:
        inputs: (n, *input_shape): float32, int64, or bytes that count 255ths.
        targets: (n,), int64.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.inputs.device

    def read(self, rows: Tensor) -> Tensor:
        """The inputs of `rows`, (m,) int64: (m, *input_shape), the very values that the examples had."""
        found = self.inputs.index_select(0, rows)
        return found.to(torch.float32).div_(WHITE) if found.dtype == torch.uint8 else found


def resident(examples: Examples, device: torch.device) -> Resident:
    """The examples on a device, as bytes where that gives the same values again."""
    inputs = _as_bytes(examples.inputs) if examples.inputs.is_floating_point() else None
    return Resident((examples.inputs if inputs is None else inputs).to(device), examples.targets.to(device))


def _as_bytes(inputs: Tensor) -> Tensor | None:
    """None where a value is not a whole 255th in [0, 1], to the last bit."""
    whole = torch.empty(inputs.shape, dtype=torch.uint8)
    for start in range(0, len(inputs), PIECE):
        piece = inputs[start : start + PIECE]
        whole[start : start + PIECE] = (piece * WHITE).round_().clamp_(0, WHITE)
        if not torch.equal(whole[start : start + PIECE].to(torch.float32).div_(WHITE), piece):
            return None
    return whole
