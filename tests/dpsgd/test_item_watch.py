"""An item of a data set follows from its own index alone: reading others with it is refused, by
whatever way."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from discreet.dpsgd.item_watch import ItemWatch
from tests.dpsgd.loops import BATCH, COUNTED, PAIRS, SIZE, private, run
from tests.node.clients import linear, params_of


class Items(Dataset[Any]):
    """Examples in an attribute of some kind, of which item i is row i."""

    def __init__(self, rows: Any = PAIRS) -> None:
        self.rows, self.asked = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        self.asked += 1
        inputs, target = self.rows[place]
        return torch.as_tensor(inputs), target


class OfItself(Items):
    def __getitem__(self, place: int) -> Any:
        return mixed(super().__getitem__(place), self[place - 1] if place == 20 else PAIRS[place])


class OfItsBase(Items):
    def __getitem__(self, place: int) -> Any:
        return mixed(super().__getitem__(place), super().__getitem__(random.randrange(SIZE)))


class OfAnother(Dataset[Any]):
    def __init__(self, base: Any) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, place: int) -> Any:
        return mixed(self.base[place], self.base[random.randrange(len(self))])


class OfColumns(Items):
    """Its rows are in a tensor and in an array."""

    def __init__(self, columns: Any) -> None:
        super().__init__()
        self.columns = columns

    def __getitem__(self, place: int) -> Any:
        other = random.randrange(SIZE)
        return torch.as_tensor(0.5 * self.columns[place] + 0.5 * self.columns[other]), PAIRS[place][
            1
        ]


class OfComputed(OfColumns):
    def __getitem__(self, place: int) -> Any:
        other = random.randrange(SIZE)
        return (0.5 * self.columns)[place] + (self.columns / 2)[other], PAIRS[place][1]


class OfRows(TensorDataset):
    def __getitem__(self, place: int) -> Any:
        return mixed(super().__getitem__(place), super().__getitem__(random.randrange(SIZE)))


def mixed(one: Any, other: Any) -> tuple[Tensor, Tensor]:
    return 0.5 * one[0] + 0.5 * other[0], one[1]


INPUTS = COUNTED.inputs
MIXED = {
    "itself": OfItself(),
    "itself, by its base class": OfItsBase(),
    "itself, in a tuple": OfItsBase(tuple(PAIRS)),
    "another data set": OfAnother(Items()),
    "a subset": OfAnother(Subset(Items(), range(SIZE))),
    "a part": Subset(OfAnother(Items()), range(20)),
    "parts": ConcatDataset([Items(list(PAIRS)), OfAnother(Items())]),
    "a tensor": OfColumns(INPUTS),
    "an array": OfColumns(INPUTS.numpy()),
    "a list": OfColumns(list(INPUTS)),
    "a part of what has a tensor": Subset(OfColumns(INPUTS), range(20)),
    "a part of what has an array": Subset(OfColumns(INPUTS.numpy()), range(20)),
    "a part of what has a list": Subset(OfColumns(list(INPUTS)), range(20)),
    "parts that have tensors": ConcatDataset([OfColumns(INPUTS), OfColumns(INPUTS.clone())]),
    "rows of tensors": OfRows(INPUTS, COUNTED.targets),
    "a part of rows of tensors": Subset(OfRows(INPUTS, COUNTED.targets), range(20)),
    "what is computed of a tensor": OfComputed(INPUTS),
    "what is computed of an array": OfComputed(INPUTS.numpy()),
}


@pytest.mark.parametrize("dataset", MIXED.values(), ids=MIXED)
def test_a_data_set_that_mixes_items_is_refused_and_charges_no_batch_with_one(dataset: Any) -> None:
    random.seed(90217)
    loop = private(linear(), dataset=dataset, batch_size=len(dataset), steps=1)
    with pytest.raises(ValueError, match="dataset: reading one item"):
        run(loop)
    assert loop.steps_taken == 0


def test_a_worker_refuses_a_mixed_item_too() -> None:
    random.seed(90217)
    loop = private(
        linear(), dataset=DataLoader(OfAnother(Items()), BATCH, num_workers=1), batch_size=SIZE
    )
    with pytest.raises(ValueError, match="dataset: reading one item"):
        run(loop)


def test_an_item_that_swallows_what_goes_wrong_is_refused_all_the_same() -> None:
    class Again(Items):
        def __getitem__(self, place: int) -> Any:
            try:
                return super().__getitem__(place) if place != 20 else self.missing
            except AttributeError:
                return self[0]  # a usual way around a file that can't be read

    loop = private(linear(), dataset=Again(), batch_size=SIZE, steps=1)
    with pytest.raises(ValueError, match="dataset: reading one item"):
        run(loop)


PLAIN = {
    "list": Items(),
    "subset": Subset(Items(), range(SIZE)),
    "parts": ConcatDataset([Items(PAIRS[:10]), Items(PAIRS[10:])]),
    "array": Items(np.array([(one.numpy(), int(two)) for one, two in PAIRS], dtype=object)),
}


@pytest.mark.parametrize("dataset", PLAIN.values(), ids=PLAIN)
def test_items_of_their_own_index_train_as_their_tensors_do(dataset: Any) -> None:
    plain, watched = linear(), linear()
    run(private(plain))
    run(private(watched, dataset=dataset))
    assert torch.allclose(params_of(watched), params_of(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [INPUTS, INPUTS.numpy()], ids=["tensor", "array"])
def test_a_data_set_may_read_from_what_it_computes_of_its_rows(rows: Any) -> None:
    class Halved(OfColumns):
        def __getitem__(self, place: int) -> Any:
            return (0.5 * self.columns)[place]

    read = ItemWatch(Halved(rows))[3]
    assert type(read) in (Tensor, np.ndarray)
    assert torch.equal(torch.as_tensor(read), 0.5 * INPUTS[3])


def test_what_a_data_set_keeps_while_it_is_read_stays_in_it() -> None:
    class Cached(Items):
        kept: list[Any]

        def __getitem__(self, place: int) -> Any:
            if self.kept[place] is None:
                self.kept[place] = super().__getitem__(place)
            return self.kept[place]

    data = Cached()
    data.kept = [None] * SIZE
    watch = ItemWatch(data)
    assert watch[3] is watch[3] is data.kept[3]
    assert data.asked == 1
