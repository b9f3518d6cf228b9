"""Data sets and DataLoaders as a loop reads them: Poisson batches, drawn once, whole or in pieces, with workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

from discreet.dpsgd import poisson_batches
from discreet.dpsgd.dpsgd import BatchError
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from tests.dpsgd.loops import BATCH, COUNTED, PAIRS, SIZE, private, run, stacked
from tests.node.clients import linear, params_of

TENSORS = TensorDataset(COUNTED.inputs, COUNTED.targets)
SAMPLER = RandomSampler(range(SIZE))


class Pairs(Dataset[Any]):
    """The examples one by one: counts how often each is read, and raises once at one of them."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.read, self.raises_at = Counter[int](), raises_at

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        self.read[place] += 1
        if place == self.raises_at:
            self.raises_at = None
            raise OSError("the disk is slow")
        return PAIRS[place]


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_gives_its_data_set_workers_and_collate_and_draws_as_the_data_set_alone(
    workers: int, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    prefetch = 2 if workers else None
    loader = DataLoader(
        Pairs(), BATCH, sampler=SAMPLER, num_workers=workers, prefetch_factor=prefetch, collate_fn=stacked
    )
    plain, loaded = linear(), linear()
    run(private(plain))
    run(private(loaded, dataset=loader, batch_size=None, max_physical_batch=most))
    assert torch.allclose(params_of(loaded), params_of(plain), rtol=1e-5, atol=1e-6)
    (said,) = (line for line in caplog.messages if "DataLoader" in line)
    assert said == "DPSGD replaces RandomSampler by Poisson batches of all 30 examples of the DataLoader"


class Stream(IterableDataset[Any]):
    """It has a length, and its examples no numbers."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        return iter(PAIRS)


def test_data_without_numbers_without_batches_or_of_a_part_of_the_data_set_are_refused() -> None:
    some = SubsetRandomSampler(range(20))
    refused: dict[str, Any] = {
        "must be map-style": DataLoader(Stream(), BATCH),
        "makes no batches": DataLoader(TENSORS, batch_size=None),
        "SubsetRandomSampler leaves examples out": DataLoader(TENSORS, BATCH, sampler=some),
    }
    for said, loader in refused.items():
        with pytest.raises(ValueError, match=said):
            private(linear(), dataset=loader)


def test_what_workers_have_read_ahead_is_neither_charged_nor_lost() -> None:
    loader = DataLoader(Pairs(), BATCH, num_workers=1, prefetch_factor=4)
    ahead, plain = linear(), linear()
    loop, other = private(ahead, dataset=loader), private(plain)
    for _ in range(len(loop)):  # each step in a loop that is left
        loop.step(*next(iter(loop)))
        other.step(*next(iter(other)))
        assert (loop.steps_taken, loop.epsilon()) == (other.steps_taken, other.epsilon())
    assert torch.allclose(params_of(ahead), params_of(plain), rtol=1e-5, atol=1e-6)


def test_a_batch_is_drawn_once_although_it_is_read_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = list[Tensor](), poisson_batches.step_batch
    monkeypatch.setattr(poisson_batches, "step_batch", lambda *a, **k: drawn.append(draw(*a, **k)) or drawn[-1])
    data, model = Pairs(), linear()
    loop = private(model, dataset=data, seed=None, batch_size=SIZE, steps=1, max_physical_batch=8)
    data.raises_at = 19  # in the third piece of four
    with pytest.raises(OSError, match="slow"):
        run(loop)
    run(loop)
    assert len(drawn) == 1
    assert loop.steps_taken == 1


@pytest.mark.parametrize("place", [2, 19])  # in the first piece, and in the third one of four
def test_pieces_read_before_an_error_do_not_count_twice(place: int) -> None:
    whole, again = linear(), linear()
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "batch_size": SIZE, "steps": 2}
    run(private(whole, **settings))
    loop = private(again, dataset=Pairs(raises_at=place), max_physical_batch=8, **settings)
    with pytest.raises(OSError, match="slow"):
        run(loop)
    run(loop)
    assert torch.allclose(params_of(again), params_of(whole), rtol=1e-5, atol=1e-6)


def test_of_a_large_batch_no_more_examples_are_read_at_a_time_than_max_physical_batch() -> None:
    data = Pairs()
    loop = private(linear(), dataset=data, batch_size=SIZE, epochs=1, max_physical_batch=7)
    stepped, sizes = list[bool](), list[int]()
    for inputs, targets in loop:
        sizes.append(len(inputs))
        assert data.read.total() == sum(sizes)
        stepped.append(loop.step(inputs, targets))
    assert sizes == [7, 7, 7, 7, 2]
    assert stepped == [False, False, False, False, True]


def test_a_piece_is_let_go_of_before_the_next_one_is_read() -> None:
    made, alive = list[ref[Tensor]](), list[int]()

    def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        alive.append(sum(each() is not None for each in made))
        batch = stacked(pairs)
        made.append(ref(batch[0]))
        return batch

    loop = private(linear(), dataset=Pairs(), collate_fn=collate, batch_size=SIZE, steps=2, max_physical_batch=5)
    alive.clear()
    for inputs, targets in loop:
        loop.step(inputs, targets)
        del inputs, targets
    assert alive == [0] * 12


def test_a_piece_cannot_be_left_out_and_a_loop_that_is_left_amid_a_batch_goes_on_with_it() -> None:
    whole, left = linear(), linear()
    run(private(whole))
    loop = private(left, max_physical_batch=3)
    for inputs, targets in loop:
        loop.step(inputs, targets)
        break
    pieces = iter(loop)
    next(pieces)
    with pytest.raises(BatchError, match="was not stepped"):
        next(pieces)
    assert loop.epsilon() == 0
    run(loop)
    assert torch.allclose(params_of(left), params_of(whole), rtol=1e-5, atol=1e-6)


def test_a_last_piece_that_the_ledger_refuses_counts_once_if_it_is_tried_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    whole, again = linear(), linear()
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "batch_size": SIZE, "steps": 1}
    run(private(whole, **settings))
    loop = private(again, ledger=ledger.path, max_physical_batch=20, **settings)
    batches = iter(loop)
    loop.step(*next(batches))
    last = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(DurableLedger, "charge", lambda *_, **more: (_ for _ in ()).throw(LedgerError("it is locked")))
        for _ in range(2):
            with pytest.raises(LedgerError, match="locked"):
                loop.step(*last)
    assert loop.step(*last)
    assert torch.allclose(params_of(again), params_of(whole), rtol=1e-5, atol=1e-6)


def test_no_worker_outlives_the_loop() -> None:
    import torch.multiprocessing as processes

    loop = private(linear(), dataset=DataLoader(Pairs(), BATCH, num_workers=1), epochs=1)
    run(loop)
    assert processes.active_children() == []
