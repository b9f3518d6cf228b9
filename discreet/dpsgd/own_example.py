"""Checks that a row of a batch follows from its own example alone: from none that are joined with
it, and from none that were read before it, as with a running mean."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from functools import partial
from operator import is_
from types import BuiltinMethodType, CellType, FunctionType, MethodType, MethodWrapperType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from discreet.dpsgd.item_draws import generator_states, seeded
from discreet.per_example.held_values import (
    BYTES,
    CONTAINERS,
    PLAIN,
    SETS,
    attributes_of,
    contents_of,
    entries_of,
    fill,
    refill,
)
from discreet.per_example.objective import Tree, batches_in, count_of, rows_of
from discreet.per_example.trial import differ, is_same

Batch = tuple[Tree, Tree]
Triple = tuple[int, int, int]  # two items, and one that is read after either
Join = Callable[[list[Any]], Batch]  # a batch of examples
# examples and draws by which a collate_fn is tried
_TRIED = 5
_SEEDS = 16
_OTHERS = 16  # items, each of which takes the place of an example
_PAIRS = 8  # of items, one read before another one
# A coin thrown for each item looks like a dependence in a quarter of the repetitions.
_REPETITIONS = 15
_MOST_ENTRIES = 1024  # of a container that is copied
_MOST_NUMBERS = 2**18  # of a tensor or an array that is copied: larger ones are rows
_MOST_COPIED = 2**20  # numbers in all; the rest is shared
_NUMBERS_OF_ENTRY = 64  # that take as long to copy as an entry of a container
_DEPTH = 6
_TABLES = ("__array__", "__array_interface__")  # what tables and images have: they are rows
_BOUND = (BuiltinMethodType, MethodWrapperType)  # methods of what is written in C, as of a dict
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def check_collate(join: Join, items: Any) -> None:
    """Raises ValueError if a row of a batch depends on several of its examples, or on earlier
    batches. Rows may change their order, and be padded to the longest example, which `PaddingTrial`
    tries with the model: only batches of the same shape are compared."""
    examples = _some_of(items, _TRIED)
    drawn = [_joined(join, examples, seed=seed) for seed in range(_SEEDS)]
    if strangers(drawn[0], _joined(join, examples, seed=0)):
        raise ValueError(
            "collate_fn: the same examples give another batch: it keeps something of those before, "
            "or draws random numbers that the seeds of torch, random and numpy do not repeat"
        )
    draws = any(strangers(drawn[0], other) for other in drawn)
    others = _some_of(items, _OTHERS) if draws else []
    states = [_states_after(join, examples, seed=seed) for seed in range(_SEEDS if draws else 0)]
    mixes = False
    for place in range(len(examples) if len(examples) > 1 else 0):
        before = examples[:place]
        after = examples[place + 1 :]
        if draws:  # for fewer examples it would draw other numbers
            changed = [*before, tree_map(_changed, examples[place]), *after]
            found = (
                strangers(_joined(join, changed, seed=seed), drawn[seed]) for seed in range(_SEEDS)
            )
            if max(found) > 1 or any(
                _mixes(join, [*before, other, *after], drawn, states) for other in others
            ):
                mixes = True
        else:
            mixes = mixes or strangers(_joined(join, before + after, seed=0), drawn[0]) > 0
    if mixes:
        raise ValueError(
            "collate_fn: a row of the batch depends on several examples: make each row from its "
            "own example"
        )


def _some_of(items: Any, most: int) -> list[Any]:
    count = len(items)
    with seeded(0):
        return [items[place] for place in range(0, count, max(1, count // most))[:most]]


def _mixes(join: Join, changed: list[Any], drawn: list[Batch], states: list[object]) -> bool:
    """True if examples of which one was changed have several other rows than the batches `drawn`,
    by each seed. If other numbers are drawn for them (`states`), that tells nothing."""
    return all(
        strangers(_joined(join, changed, seed=seed), batch) > 1
        and _states_after(join, changed, seed=seed) == states[seed]
        for seed, batch in enumerate(drawn)
    )


def _states_after(join: Join, examples: list[Any], *, seed: int) -> object:
    """The states of the generators when a batch was made."""
    with seeded(seed):
        join(list(examples))
        return generator_states()


def _joined(join: Join, examples: list[Any], *, seed: int) -> Batch:
    with seeded(seed):
        return join(list(examples))


def strangers(some: Batch, among: Batch) -> int:
    """The number of rows of a batch that are not in another one; 0 for batches of different
    shapes."""
    shapes = [
        [each.shape[1:] for each in batches_in(batch) if isinstance(each, Tensor)]
        for batch in (some, among)
    ]
    if shapes[0] != shapes[1]:
        return 0

    def rows(batch: Batch) -> list[list[Tensor]]:
        return [tree_leaves(rows_of(batch, [place])) for place in range(count_of(batch))]

    def alike(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        if one.is_floating_point():
            return not differ(one, other)
        return is_same(one, other)

    wanted = rows(among)
    return sum(not any(all(map(alike, row, each)) for each in wanted) for row in rows(some))


def _changed(value: Any) -> Any:
    """Other values of the same kind and shape. Single whole numbers, and values that are not
    numbers, are not changed."""
    if isinstance(value, float):
        return 0.5 * value + 0.125
    if not isinstance(value, Tensor | np.ndarray):
        return value
    changed = torch.as_tensor(value)
    if changed.is_floating_point():
        changed = 0.5 * changed + 0.125
    elif changed.dim():
        changed = changed.flip(0)
    if isinstance(value, Tensor):
        return changed
    return changed.numpy()


def check_nothing_left(dataset: Any, owners: Sequence[object] | None, join: Join) -> None:
    """Raises ValueError if an item depends on those read before it, of other `owners`.

    It is looked for in copies of the data set. What is kept in large tensors and containers, in
    classes or in global names is not seen; nor is a data set whose copies can't be read.
    """
    is_found = False
    with suppress(Exception):
        is_found = _is_found(dataset, _triples(len(dataset), owners), join)
    if is_found:
        raise ValueError(
            "dataset: an item depends on those read before it (a running mean, mixup with the last "
            "item), and would carry them into batches that did not draw them: make an item of its "
            "own index alone"
        )


def _is_found(dataset: Any, triples: list[Triple], join: Join) -> bool:
    """True if items depend on those read before, each time: where random numbers are drawn in a way
    that can't be repeated, items differ by chance."""
    if not _depends(dataset, triples, join):
        return False
    same = [(one, one, place) for one, _, place in triples]
    return all(
        _depends(dataset, triples, join) and not _depends(dataset, same, join)
        for _ in range(_REPETITIONS)
    )


def _triples(items: int, owners: Sequence[object] | None) -> list[Triple]:
    """Different items in all places: an item that is read again may come from a cache."""
    pairs = min(_PAIRS, items // 3)
    drawn = iter(random.Random(20613).sample(range(items), 3 * pairs))
    return [
        (one, other, place)
        for one, other, place in zip(drawn, drawn, drawn, strict=True)
        if owners is None or owners[place] not in (owners[one], owners[other])
    ]


def _depends(dataset: Any, triples: list[Triple], join: Join) -> bool:
    """True if an item differs between two copies of a data set, one of which read the first item of
    each triple before it, and the other one the second."""
    copies = _Copy(dataset), _Copy(dataset)
    for seed, (*before, place) in enumerate(triples):
        for copied, first in zip(copies, before, strict=True):
            copied.read(first, join, seed)
        copies[0].give_numbers(copies[1])
        items = [copied.read(place, join, seed) for copied in copies]
        if not all(map(_is_alike, *map(tree_leaves, items))):
            return True
    return False


def _is_alike(one: Any, other: Any) -> bool:
    return one is other is None or is_same(one, other)


class _Copy:
    """A copy of a data set, and of what it may change while it is read. Its rows are shared."""

    def __init__(self, dataset: Any) -> None:
        self._made = dict[int, Any]()  # by the identity of the original
        self._left = _MOST_COPIED
        self._numbers = list[Any]()  # its generators
        self._dataset = self._copied(dataset, 0)

    def read(self, place: int, join: Join, seed: int) -> Batch:
        """The batch of one item."""
        with seeded(seed):
            return join([self._dataset[place]])

    def give_numbers(self, other: _Copy) -> None:
        """Lets another copy draw the numbers that this one draws next."""
        for mine, theirs in zip(self._numbers, other._numbers, strict=True):
            if isinstance(mine, np.random.Generator):
                theirs.bit_generator.state = mine.bit_generator.state
            elif isinstance(mine, random.Random):
                theirs.setstate(mine.getstate())
            else:
                theirs.set_state(mine.get_state())

    def _copied(self, value: Any, depth: int) -> Any:
        if type(value) in PLAIN:
            return value
        if id(value) not in self._made:
            # The original is held, so that its identity stays its own.
            self._made[id(value)] = self._new(value, depth), value
        return self._made[id(value)][0]

    def _new(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _GENERATORS:
            self._numbers.append(deepcopy(value))
            return self._numbers[-1]
        if isinstance(value, Tensor):
            return value.detach().clone() if self._takes(value.numel()) else value
        if isinstance(value, np.ndarray):
            return value.copy() if self._takes(value.size) else value
        if depth == _DEPTH:
            return value
        if isinstance(value, CONTAINERS):
            weight = 1 if isinstance(value, BYTES) else _NUMBERS_OF_ENTRY
            is_small = weight == 1 or len(value) <= _MOST_ENTRIES
            is_copied = is_small and self._takes(weight * len(value))
            return self._container(value, depth) if is_copied else value
        if isinstance(value, (MethodType, partial, FunctionType, *_BOUND)):
            return self._callable(value, depth)
        has_slots = any("__slots__" in vars(base) for base in kind.__mro__)
        if not (has_slots or hasattr(value, "__dict__")):
            return value
        return self._object(value, depth)

    def _takes(self, numbers: int) -> bool:
        """True if so much may be copied; then it counts."""
        if numbers > min(_MOST_NUMBERS, self._left):
            return False
        self._left -= numbers
        return True

    def _container(self, value: Any, depth: int) -> Any:
        """A copy of a container and of what it holds; a tuple that holds nothing new is itself."""
        if isinstance(value, tuple):
            held = [self._copied(each, depth + 1) for each in value]
            return value if all(map(is_, held, value)) else tuple.__new__(type(value), held)
        made = self._object(value, depth)
        if made is value or isinstance(value, (*SETS, *BYTES)):
            return made
        entries = entries_of(value)
        if isinstance(entries, dict):
            refill(made, {key: self._copied(each, depth + 1) for key, each in entries.items()})
        else:
            refill(made, [self._copied(each, depth + 1) for each in entries])
        return made

    def _callable(self, value: Any, depth: int) -> Any:
        """A function whose objects and variables are copies."""
        if isinstance(value, partial):
            parts = [value.func, value.args, value.keywords]
            function, args, named = (self._copied(part, depth + 1) for part in parts)
            return partial(function, *args, **named)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._copied(value.__self__, depth + 1))
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        owner = self._copied(value.__self__, depth + 1)
        return value if owner is value.__self__ else getattr(owner, value.__name__)

    def _function(self, value: FunctionType, depth: int) -> FunctionType:
        """A function with variables of its own; itself if it takes none from where it was made."""
        if not value.__closure__:
            return value
        cells = [self._cell(cell) for cell in value.__closure__]
        made = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
        )
        made.__kwdefaults__ = value.__kwdefaults__
        vars(made).update(vars(value))
        self._made[id(value)] = made, value
        for cell, old in zip(cells, value.__closure__, strict=True):
            fill(cell, self._copied(contents_of(old), depth + 1))
        return made

    def _cell(self, cell: CellType) -> CellType:
        """The variable that takes the place of one: functions may share it."""
        return self._made.setdefault(id(cell), (CellType(None), cell))[0]  # type: ignore[no-any-return]

    def _object(self, value: Any, depth: int) -> Any:
        """A copy of an object and its attributes; itself if it can't be copied, as a lock."""
        kind = type(value)
        if any(hasattr(kind, name) for name in _TABLES):
            return value
        # A method of its own could copy rows.
        is_new = hasattr(kind, "__copy__") and not isinstance(value, CONTAINERS)
        try:
            made = object.__new__(kind) if is_new else copy(value)
        except Exception:  # noqa: BLE001, whatever it is
            return value
        if made is not value:  # classes and modules are their own copies
            self._made[id(value)] = made, value
            held = value if is_new else made
            for name, each in attributes_of(held).items():
                own = self._copied(each, depth + 1)
                if name in getattr(held, "__dict__", ()):
                    vars(made)[name] = own
                else:
                    object.__setattr__(made, name, own)
        return made
