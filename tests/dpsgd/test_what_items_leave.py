"""An item of a data set does not depend on which items were read before it."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from tests.dpsgd.loops import COUNTED, SIZE, private, run
from tests.node.clients import linear

INPUTS, TARGETS = COUNTED.inputs, COUNTED.targets


class Kept(Dataset[Any]):
    """Item i is row i, as `made` from it and from what the data set kept."""

    def __init__(self) -> None:
        self.names = list(range(SIZE))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, place: int) -> Any:
        return self.made(INPUTS[place]), TARGETS[place]

    def made(self, row: Tensor) -> Tensor:
        raise NotImplementedError


class RunningMean(Kept):
    """It takes the mean of what it has read so far from each item."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(INPUTS.shape[1:])

    def made(self, row: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * row
        return row - self.mean


class InPlace(RunningMean):
    def made(self, row: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * row)
        return row - self.mean


class InAnArray(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.mean = np.zeros(INPUTS.shape[1:], dtype=np.float32)

    def made(self, row: Tensor) -> Tensor:
        self.mean += 0.1 * row.numpy()
        return row - torch.tensor(self.mean)


class MixedWithTheLast(Kept):
    """Mixup with the item before, in every second item in the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"last": torch.zeros(INPUTS.shape[1:])}

    def made(self, row: Tensor) -> Tensor:
        last, self.state["last"] = self.state["last"], row
        return 0.5 * row + 0.5 * last if random.random() < 0.5 else row


class FromAQueue(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.held = SimpleNamespace(rows=deque[Tensor](maxlen=4))

    def made(self, row: Tensor) -> Tensor:
        self.held.rows.append(row)
        return torch.stack(list(self.held.rows)).mean(dim=0)


class ByATransform(Kept):
    """A layer that keeps running statistics, called by a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.normalise = Normalise().eval().apply_to

    def made(self, row: Tensor) -> Tensor:
        return self.normalise(row)


class Normalise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(INPUTS.shape[1:]))

    def apply_to(self, row: Tensor) -> Tensor:
        self.get_buffer("mean").add_(0.1 * row)
        return row - self.mean


class Numbers(NamedTuple):
    means: list[float]


class InSlots:
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 0.0


class WithACopy:
    def __init__(self) -> None:
        self.mean = 0.0

    def __copy__(self) -> Any:
        raise AssertionError("a copy of it may be large")


class Entries(list[float]):
    mean = 0.0


def entry(held: Any, key: Any) -> tuple[Any, Any]:
    return partial(held.__getitem__, key), partial(held.__setitem__, key)


def attribute(held: Any) -> tuple[Any, Any]:
    return partial(getattr, held, "mean"), partial(setattr, held, "mean")


def variable() -> tuple[Any, Any]:
    mean = 0.0

    def write(new: float) -> None:
        nonlocal mean
        mean = new

    return (lambda: mean), write


def in_a_named_tuple() -> tuple[Any, Any]:
    held = Numbers([0.0])
    return (lambda: held.means[0]), (lambda new: entry(held.means, 0)[1](new))


class Elsewhere(Kept):
    """A running mean that two functions, attributes of the data set, read and write."""

    def __init__(self, kept: Callable[[], tuple[Any, Any]]) -> None:
        super().__init__()
        self.read, self.write = kept()

    def made(self, row: Tensor) -> Tensor:
        self.write(0.9 * self.read() + 0.1 * float(row.mean()))
        return row - self.read()


class OfEachClass(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.means = defaultdict[int, float](float)

    def made(self, row: Tensor) -> Tensor:
        self.means[0] = 0.9 * self.means[0] + 0.1 * float(row.mean())
        return row - self.means[0]


ELSEWHERE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a default dictionary": lambda: entry(defaultdict(float, mean=0.0), "mean"),
    "an ordered dictionary": lambda: entry(OrderedDict(mean=0.0), "mean"),
    "a dictionary of a type of its own": lambda: entry(UserDict(mean=0.0), "mean"),
    "an array of numbers": lambda: entry(array("d", [0.0]), 0),
    "slots": lambda: attribute(InSlots()),
    "an object with a copy": lambda: attribute(WithACopy()),
    "an attribute of a list": lambda: attribute(Entries([1.0])),
    "an entry of a list of a type of its own": lambda: entry(Entries([0.0]), 0),
    "a variable": variable,
    "a named tuple": in_a_named_tuple,
}
KEPT = {
    **{name: partial(Elsewhere, kept) for name, kept in ELSEWHERE.items()},
    "a mean of each class": OfEachClass,
    "a running mean": RunningMean,
    "a tensor in place": InPlace,
    "an array in place": InAnArray,
    "the item before": MixedWithTheLast,
    "a queue": FromAQueue,
    "a layer": ByATransform,
    "a part": lambda: Subset(RunningMean(), range(20)),
    "parts": lambda: ConcatDataset([MixedWithTheLast(), RunningMean()]),
}


@pytest.mark.parametrize("made", KEPT.values(), ids=KEPT)
def test_a_data_set_whose_items_depend_on_those_read_before_is_refused(made: Any) -> None:
    with pytest.raises(ValueError, match=r"^dataset: an item depends on those read before"):
        private(linear(), dataset=made())


class Later(RunningMean):
    """It begins after 150 reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def made(self, row: Tensor) -> Tensor:
        self.reads += 1
        changed = super().made(row)
        return changed if self.reads > 150 else row


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mean_that_is_used_only_later_is_refused_then(workers: int) -> None:
    data = DataLoader(Later(), SIZE, num_workers=workers)
    loop = private(linear(), dataset=data, batch_size=SIZE, epochs=10)
    with pytest.raises(ValueError, match="an item depends on those read before"):
        run(loop)
    assert 4 < loop.steps_taken < 10


def test_owners_do_not_make_up_for_it() -> None:
    with pytest.raises(ValueError, match=r"^dataset: an item depends on those read before"):
        private(linear(), dataset=RunningMean(), owners=[place // 2 for place in range(SIZE)])


class Augmented(Kept):
    """Noise of a generator of its own, by a number of draws that differs between rows."""

    def __init__(self, numbers: Any) -> None:
        super().__init__()
        self.numbers = numbers

    def made(self, row: Tensor) -> Tensor:
        for _ in range(1 + int(row.sum().abs() * 7) % 3):
            drawn = self.draw()
        return row + drawn

    def draw(self) -> float:
        if isinstance(self.numbers, torch.Generator):
            return float(torch.rand((), generator=self.numbers))
        return float(self.numbers.random())


class FromTheSystem(Augmented):
    def draw(self) -> float:
        return float(np.random.default_rng().integers(2))


class Counting(Kept):
    """Weaker augmentation the more it has read, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"read": 0}
        self.cache = dict[int, Any]()

    def __getitem__(self, place: int) -> Any:
        self.counts["read"] += 1
        if place not in self.cache:
            self.cache[place] = super().__getitem__(place)
        return self.cache[place]

    def made(self, row: Tensor) -> Tensor:
        return row + torch.rand(row.shape) / self.counts["read"]


class InMaps(Counting):
    """Counts and a cache in maps of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = defaultdict(int)
        self.cache = UserDict()


class AugmentedBy(Kept):
    """Noise of generators that are behind functions."""

    def __init__(self) -> None:
        super().__init__()
        numbers = random.Random(4)
        self.first = partial(np.random.Generator.random, np.random.default_rng(4))
        self.others = (random.Random(5).random, lambda: numbers.random())

    def made(self, row: Tensor) -> Tensor:
        for _ in range(1 + int(row.sum().abs() * 7) % 3):
            drawn = self.first() + sum(draw() for draw in self.others)
        return row + drawn


ALONE = {
    "functions that draw": AugmentedBy,
    "maps of other types": InMaps,
    "a generator of numpy": lambda: Augmented(np.random.default_rng(4)),
    "one of random": lambda: Augmented(random.Random(4)),
    "one of torch": lambda: Augmented(torch.Generator().manual_seed(4)),
    "the system's numbers": lambda: FromTheSystem(None),
    "a count": Counting,
}


@pytest.mark.parametrize("made", ALONE.values(), ids=ALONE)
def test_augmentation_counts_and_caches_are_no_such_dependence(made: Any) -> None:
    assert run(private(linear(), dataset=made(), steps=2)).steps_taken == 2


def test_the_look_changes_nothing_in_the_data_set_and_draws_nothing_from_generators() -> None:
    data = Counting()
    numbers = random.Random(4)
    augmented = Augmented(numbers)
    random.seed(51)
    np.random.seed(51)
    torch.manual_seed(51)
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state(), numbers.getstate()
    private(linear(), dataset=data)
    private(linear(), dataset=augmented)
    assert (data.counts["read"], data.cache) == (0, {})
    after = random.getstate(), np.random.get_state()[2], torch.get_rng_state(), numbers.getstate()
    assert torch.equal(before[2], after[2])
    assert (before[0], before[1], before[3]) == (after[0], after[1], after[3])


def test_rows_that_a_data_set_holds_are_not_copied_for_it() -> None:
    places = set[int]()

    class Large(Kept):
        def __init__(self) -> None:
            super().__init__()
            self.rows = np.zeros((SIZE, 16384), dtype=np.float32)
            self.small = np.zeros(3)
            self.more = UserDict(dict.fromkeys(range(2000), 0.0))

        def made(self, row: Tensor) -> Tensor:
            places.add(self.rows.__array_interface__["data"][0])
            places.add(self.small.__array_interface__["data"][0])
            places.add(id(self.more.data))
            return row

    private(linear(), dataset=Large())
    assert len(places) == 4  # of the rows, the dictionary, and two copies of the small array
