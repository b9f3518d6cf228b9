"""What virtual clients hold: numbers of examples, decided by who they are; and padded batches of nothing else."""

from __future__ import annotations

import pytest
import torch

from discreet.data.examples import Examples
from discreet.simulation.client_examples import PIECE, shared_examples

CPU = torch.device("cpu")
ALL_BYTES = torch.arange(256, dtype=torch.float32).div_(255)
INPUTS = {
    "images": (ALL_BYTES.view(64, 4), torch.uint8),
    "more than a piece": (ALL_BYTES.repeat(PIECE // 128).view(-1, 1), torch.uint8),
    "nothing": (torch.zeros(0, 4), torch.uint8),
    "negative": (torch.tensor([[-1 / 255]]), torch.float32),
    "above one": (torch.tensor([[256 / 255]]), torch.float32),
    "one bit off": (torch.nextafter(ALL_BYTES[100:104], torch.ones(4)).view(4, 1), torch.float32),
    "not a number": (torch.tensor([[float("nan")]]), torch.float32),
    "infinite": (torch.tensor([[float("inf")]]), torch.float32),
    "tokens": (torch.tensor([[3, 999]]), torch.int64),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_what_is_read_is_what_was_there(kind: str) -> None:
    inputs, stored = INPUTS[kind]
    data = shared_examples(Examples(inputs, torch.arange(len(inputs))), CPU)
    assert data.inputs.dtype == stored
    rows = torch.arange(len(inputs)).flip(0)
    assert torch.equal(data.read(rows).nan_to_num(nan=5), inputs.flip(0).nan_to_num(nan=5))
    assert data.read(rows).dtype == inputs.dtype
