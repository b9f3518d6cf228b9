"""A watch over a data set: reading one of its items must not read another one, and no two items may
read the same row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace, new_class
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from discreet.dpsgd.one_index import identity, is_of_datasets, selected_rows
from discreet.dpsgd.own_example import Join, check_collate, check_nothing_left
from discreet.dpsgd.row_reads import TensorReads, held_by, table_reads
from discreet.dpsgd.row_stand_ins import ROWS, rows_at, stripped

# A table with fewer rows than items holds examples if each is in at most so many items.
_MOST_COPIES = 16
_FEWEST_ROWS = 16
_SURE = 5  # items that follow a pattern, after which it is not by chance
_ENOUGH = 64  # items by which a pattern is looked for
_FEW = 64  # entries of a container that is looked into
_FIRST_LOOK = 128  # items, after which it is looked again what they leave
_TRIES = 8  # reads of two items, after which the same row is not by chance
_SPLIT = "give each example one index, or name who owns each item (owners=)"


@dataclass
class Holder:
    """What is known of something that holds rows.

    Attributes:
      count: its rows.
      is_data: True if its rows are examples: those of a data set, or as many as there are items.
      first: of examples the first item that read each row, -1 for none.
      read: of others the rows that each item read.
      is_cleared: True if items that seemed to share a row do not.
    """

    count: int
    is_data: bool
    first: Any
    read: dict[int, frozenset[int]] = field(default_factory=dict)
    is_cleared: bool = False


class ItemWatch:
    """A data set whose items must each be read from their own index alone, and from rows that no
    other item reads.

    An item that is mixed from several (mixup, mosaic, a random partner) would carry an example into
    batches that did not draw it. An example at several indices, or a value in several windows of a
    series, would count several times in a sum. It sees reads of the data set by itself, of data
    sets in its attributes, of pandas' tables and PyTorch's tensors that its methods can reach, and
    of lists, dictionaries and arrays in its attributes, also one level down. It does not see rows
    that are read from files.

    `owners`: the owner of each item; items of one owner may share rows. `join`: makes a batch of
    items, for looks at what they leave for later ones.
    """

    def __init__(self, dataset: Any, owners: Sequence[object] | None = None) -> None:
        self.dataset = dataset
        self.owners = owners
        self.join: Join | None = None
        self._begin()

    def _begin(self) -> None:
        self._rows = dict[object, set[int]]()  # the rows read for the current item, by their holder
        self._holders = dict[object, Holder]()
        self._lengths = {len(self.dataset)}  # of the data set and of those in it, as of a subset
        # the replacement of each watched object, and the object
        self._stand_ins = dict[object, tuple[Any, Any]]()
        self._reads = 0
        self._given = 0
        self._tensors = list[Tensor]()
        self._tables = list[Any]()

    def __getstate__(self) -> dict[str, Any]:
        """The state that a worker gets: the classes made here can't be pickled."""
        return {"dataset": self.dataset, "owners": self.owners, "join": self.join}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, position: int) -> Any:
        """An item. Raises ValueError: it was made from several rows, or from one of another
        item."""
        item = self._read(position)
        read = dict(self._rows)
        for key, rows in read.items():
            self._check_one_row(self._holders[key], rows, position)
        for key, rows in read.items():
            self._check_own_rows(key, rows, position)
        self._look_again()
        return item

    def _look_again(self) -> None:
        """Looks for what items and batches leave, ever more seldom: a warm-up may end amid a
        loop."""
        self._given += 1
        if self._given < _FIRST_LOOK or self._given & (self._given - 1) or self.join is None:
            return
        check_collate(self.join, self.dataset)
        check_nothing_left(self.dataset, self.owners, self.join)

    def _read(self, position: int) -> Any:
        if self._reads in (0, 1, 2) or not self._reads & (self._reads - 1):
            held = list(held_by(self.dataset))  # some is made at the first reads
            self._tensors = [value for value in held if isinstance(value, Tensor)]
            self._tables = [value for value in held if not isinstance(value, Tensor)]
        self._reads += 1
        self._rows.clear()
        with self._observed():
            return stripped(self._watched(self.dataset)[position])

    @contextmanager
    def _observed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(table_reads(self._tables, self._note))
            if self._tensors:
                stack.enter_context(TensorReads(self._tensors, self._note))
            yield

    def _note(self, key: object, index: Any, count: int) -> None:
        self._rows.setdefault(key, set()).update(rows_at(index, count))
        if key not in self._holders:
            is_data = count in self._lengths or (isinstance(key, tuple) and key[0] == "data")
            first = np.full(count, -1) if is_data else None
            self._holders[key] = Holder(count, is_data, first)

    def _is_same_owner(self, one: int, other: int) -> bool:
        if self.owners is None:
            return one == other
        return bool(self.owners[one] == self.owners[other])

    def _check_one_row(self, holder: Holder, rows: set[int], position: int) -> None:
        if not holder.is_data or len(rows) < 2:
            return
        are_items = self.owners is not None and holder.count == len(self.dataset)
        if are_items and all(self._is_same_owner(row, position) for row in rows):
            return
        raise ValueError(
            "dataset: reading one item reads others too (mixup, mosaic, a random partner, a mean "
            "of all rows), and would carry an example into batches that did not draw it: make an "
            "item of its own index alone"
        )

    def _check_own_rows(self, key: object, rows: set[int], position: int) -> None:
        if self._holders[key].is_data:
            found = self._shared(key, rows, position)
        else:
            found = self._by_pattern(key, rows, position)
        if found is not None:
            raise ValueError(
                f"dataset: items {found[0]} and {found[1]} read the same row, so that one example "
                "counts several times in a sum (a repeated index, a series cut into windows that "
                f"overlap): {_SPLIT}"
            )

    def _shared(self, key: object, rows: set[int], position: int) -> tuple[int, int] | None:
        """This item and one before it that read the same row."""
        holder = self._holders[key]
        for row in rows:
            other = int(holder.first[row])
            if other < 0:
                holder.first[row] = position
            elif not self._is_same_owner(other, position) and self._repeats(key, other, position):
                return other, position
        return None

    def _repeats(self, key: object, one: int, other: int) -> bool:
        """True if two items share a row each time, not by chance."""
        for _ in range(_TRIES):
            self._read(one)
            before = self._rows.get(key, set()).copy()
            self._read(other)
            if not before & self._rows.get(key, set()):
                return False
        return True

    def _by_pattern(self, key: object, rows: set[int], position: int) -> tuple[int, int] | None:
        """Two items that share a row of a table that need not hold examples, if the rows of all
        items so far follow from their indices as those of copies or windows do."""
        items = len(self.dataset)
        holder = self._holders[key]
        is_small = holder.count < max(_FEWEST_ROWS, items / _MOST_COPIES)
        if is_small or holder.is_cleared or len(holder.read) > _ENOUGH:
            return None
        holder.read[position] = frozenset(rows)
        if len(set(holder.read.values())) < _SURE or frozenset() in holder.read.values():
            return None
        apart = _overlap(holder.read) if holder.count > items else _copies(holder, items)
        pairs = ((one, one + apart) for one in range(items - apart if apart else 0))
        found = next((pair for pair in pairs if not self._is_same_owner(*pair)), None)
        if found is None or self._repeats(key, *found):
            return found
        holder.is_cleared = True
        return None

    def _watched(self, dataset: Any) -> Any:
        """An object that shares the attributes of a data set, with a class that notes reads."""
        if id(dataset) not in self._stand_ins:
            self._stand_ins[id(dataset)] = self._stand_in(dataset), dataset
        return self._stand_ins[id(dataset)][0]

    def _stand_in(self, dataset: Any) -> Any:
        kind: Any = type(dataset)
        self._lengths.add(len(dataset))
        note = self._noting(dataset)

        def get_item(stand_in: Any, index: Any) -> Any:
            note(index)
            return kind.__getitem__(stand_in, index)

        def iterate(stand_in: Any) -> Any:
            note(slice(None))
            return kind.__iter__(stand_in)

        def get_attribute(stand_in: Any, name: str) -> Any:
            value = kind.__getattribute__(stand_in, name)
            if name.startswith("__") and name.endswith("__"):
                return value
            return self._attribute(value, (id(dataset), name))

        names = {
            "__getitem__": get_item,
            "__getattribute__": get_attribute,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__del__": lambda _: None,  # the data set itself is still there
        }
        if hasattr(kind, "__iter__"):
            names["__iter__"] = iterate
        try:
            made: Any = object.__new__(
                new_class(kind.__name__, (kind,), {}, lambda body: body.update(names))
            )
            object.__setattr__(made, "__dict__", vars(dataset))
        # A list, or a class not written in Python, has no attributes that could hold other rows.
        except TypeError:
            return dataset
        return made

    def _noting(self, dataset: Any) -> Callable[[Any], None]:
        """A function that notes the rows at an index of a data set."""
        count = len(dataset)
        selected = selected_rows(dataset)
        if selected is None:
            key = "data", identity(dataset)
            return lambda index: self._note(key, index, count)
        rows = selected
        held = dataset._data
        return lambda index: self._note(
            ("data", id(held)), rows[sorted(rows_at(index, count))], len(held)
        )

    def _attribute(self, value: Any, place: tuple[object, object]) -> Any:
        if isinstance(value, Dataset) or is_of_datasets(value):
            return self._watched(value)
        if type(value) is SimpleNamespace:
            held = vars(value).items()
            return SimpleNamespace(**{key: self._attribute(v, (place, key)) for key, v in held})
        if type(value) in (list, tuple) and 0 < len(value) <= _FEW:
            inner = [self._attribute(each, (place, at)) for at, each in enumerate(value)]
            if any(one is not other for one, other in zip(inner, value, strict=True)):
                return type(value)(inner)
        make = ROWS.get(type(value))
        if make is None or getattr(value, "ndim", 1) == 0 or not self._may_hold(value):
            return value
        known = self._stand_ins.get(place)
        if known is None or known[1] is not value or len(known[0]) != len(value):
            made = make(value)
            made.noted = lambda index: self._note(("held", id(value)), index, len(value))
            made.whole = value
            if isinstance(value, dict):
                is_small = len(value) <= _FEW and set(value) != set(range(len(self.dataset)))
                made.places = {} if is_small else {key: at for at, key in enumerate(value)}
                made.watched = lambda inner, key: self._attribute(inner, (place, key))
            known = made, value
            self._stand_ins[place] = known
        return known[0]

    def _may_hold(self, value: Any) -> bool:
        """True for a container that may hold an example in each entry, or tables of them."""
        items = len(self.dataset)
        if len(value) >= max(2, min(items, _FEWEST_ROWS), items / _MOST_COPIES):
            return not isinstance(value, dict) or not _is_word(next(iter(value.values())))
        return type(value) is dict


def _is_word(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _copies(holder: Holder, items: int) -> int:
    """How far apart `base[i % n]` and `base[i // k]` have the same row; 0 for other rows."""
    each = -(-items // holder.count)
    read = holder.read.items()
    if all(rows == {item % holder.count} for item, rows in read):
        return holder.count
    if all(rows == {item // each} for item, rows in read):
        return 1
    return 0


def _overlap(read: dict[int, frozenset[int]]) -> int:
    """1 if each item reads a window of a series, `series[i * stride : i * stride + width]`, that
    overlaps the next one; else 0."""
    items = sorted(read)
    starts = [min(read[item]) for item in items]
    shapes = {
        frozenset(row - start for row in read[item])
        for item, start in zip(items, starts, strict=True)
    }
    strides = {
        (start - starts[0]) / (item - items[0])
        for item, start in zip(items[1:], starts[1:], strict=True)
    }
    if len(shapes) > 1 or len(strides) > 1:
        return 0
    stride = strides.pop()
    return int(stride >= 1 and any(row + stride in shape for shape in shapes for row in shape))
