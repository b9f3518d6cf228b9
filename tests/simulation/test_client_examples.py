"""What virtual clients hold: numbers of examples, decided by who they are; and padded batches of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from discreet.data.examples import Examples
from discreet.data.partition import Numbers, PartitionedExamples, SampledExamples
from discreet.simulation.client_examples import (
    PIECE,
    BatchNumbers,
    SharedExamples,
    poisson_batch,
    read,
    shared_examples,
    shuffled_batches,
    table_of,
)

MANY = SampledExamples(num_clients=10**6, num_examples=50, examples_per_client=7, seed=40583)


def test_a_partition_is_seen_as_it_is() -> None:
    client_examples = PartitionedExamples.of([torch.tensor([3, 1]), torch.tensor([2])])
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


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(lambda sizes: sorted(sizes, reverse=True))


def held(sizes: list[int]) -> list[Numbers]:
    return [np.arange(size, dtype=np.int64) + 100 * client for client, size in enumerate(sizes)]


def orders(sizes: list[int]) -> Numbers:
    drawn = np.zeros((len(sizes), max(sizes)), dtype=np.int64)
    for client, size in enumerate(sizes):
        drawn[client, :size] = np.random.default_rng(60 + client).permutation(size)
    return drawn


@given(sizes=SIZES, batch_size=st.integers(1, 10))
def test_an_epoch_visits_every_example_once_in_the_clients_order(sizes: list[int], batch_size: int) -> None:
    table, drawn, seen = table_of(held(sizes)), orders(sizes), [list[int]() for _ in sizes]
    for batch in shuffled_batches(table, drawn, batch_size=batch_size):
        assert batch.counts.max() <= batch_size
        for client, count in enumerate(batch.counts):
            seen[client] += batch.numbers[client, :count].tolist()
    assert seen == [(drawn[client, :size] + 100 * client).tolist() for client, size in enumerate(sizes)]


@given(sizes=SIZES, data=st.data())
def test_a_poisson_batch_holds_who_is_in(sizes: list[int], data: st.DataObject) -> None:
    active = sum(size > 0 for size in sizes)
    chosen = [sorted(data.draw(st.sets(st.integers(0, size - 1)))) for size in sizes[:active]]
    clients = np.repeat(np.arange(active), [len(part) for part in chosen])
    positions = np.array([position for part in chosen for position in part], dtype=np.int64)
    batch = poisson_batch(table_of(held(sizes)), clients, positions, active=active)
    found = [batch.numbers[client, : batch.counts[client]].tolist() for client in range(active)]
    assert found == [[100 * client + position for position in part] for client, part in enumerate(chosen)]


@given(sizes=SIZES)
def test_padding_reads_what_the_client_holds(sizes: list[int]) -> None:
    table = table_of(held(sizes))
    for client, size in enumerate(sizes):
        if size:
            assert (table.numbers[client] // 100 == client).all()


def test_clients_with_more_examples_come_first() -> None:
    with pytest.raises(ValueError, match="sizes must not ascend"):
        table_of(held([1, 2]))


def test_weights_make_means_and_sums_of_what_counts() -> None:
    data = SharedExamples(torch.arange(8.0).unsqueeze(1), torch.arange(8))
    batch = BatchNumbers(np.array([[3, 4], [5, 5]]), np.array([2, 1]))
    assert read(data, batch, mean=True).weights.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert read(data, batch, mean=False).weights.tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert read(data, batch, mean=False).inputs.flatten().tolist() == [3.0, 4.0, 5.0, 5.0]
