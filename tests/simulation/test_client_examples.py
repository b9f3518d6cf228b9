"""What virtual clients hold: numbers of examples, decided by who they are."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from discreet.data.examples import Examples
from discreet.simulation.client_examples import PIECE, PartitionedExamples, SampledExamples, shared_examples

MANY = SampledExamples(num_clients=10**6, num_examples=50, examples_per_client=7, seed=40583)


def test_a_partition_is_seen_as_it_is() -> None:
    client_examples = PartitionedExamples([torch.tensor([3, 1]), torch.tensor([2])])
    assert len(client_examples) == 2
    assert client_examples.examples(0).tolist() == [3, 1]
    assert client_examples.sizes(np.array([1, 0])).tolist() == [1, 2]


def test_a_client_always_holds_the_same_examples_all_different() -> None:
    first = MANY.examples(123_456).tolist()
    assert first == MANY.examples(123_456).tolist()
    assert len(set(first)) == 7
    assert first != MANY.examples(123_457).tolist()


def test_every_example_is_dealt_equally_often() -> None:
    """14,000 draws of 50: 280 each, standard deviation 15.5; a false alarm at 7 of them is below 1e-9."""
    counts = np.bincount(np.concatenate([MANY.examples(client) for client in range(2000)]), minlength=50)
    assert np.abs(counts - 280).max() < 7 * 15.5


def test_a_million_clients_cost_no_memory() -> None:
    tracemalloc.start()
    client_examples = SampledExamples(10**6, 1000, 60, seed=3)
    assert len(client_examples.examples(999_999)) == 60
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


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
