"""A trial of padding: an example that is padded to the longest one of its batch must have the
gradient that it has alone, and none may be cut. Otherwise one example would move the gradients of
all others, each by up to twice the clip norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from discreet.dpsgd.draws_at import DrawsAt
from discreet.dpsgd.item_draws import seeded
from discreet.dpsgd.own_example import strangers
from discreet.layers.refusals import CONFUSED
from discreet.per_example.agreement import in_float64
from discreet.per_example.any_model import plain_gradient
from discreet.per_example.objective import (
    Objective,
    Tree,
    batches_in,
    count_of,
    mapped,
    objective_of,
    rows_of,
    with_floats,
)
from discreet.per_example.own_code import memory_for
from discreet.per_example.per_example import trees_of
from discreet.per_example.trial import agreement, differ, exact_products, same_chance

Batch = tuple[Tree, Tree]
Shapes = tuple[torch.Size, ...]
_FIRST_LOOK = 8  # pieces, after which it is looked again, ever more seldom
_LOOKS = 16  # at batches of new shapes, before lengths were found that differ
_ITEMS = 32  # read of a batch; more of one that is longer than any of them
_SHORT = 3  # that tell something when they are tried with a longer one
_AT_FIRST = 16  # of them in the first trial that tells something
_OF_LARGE = 6  # the same for a model of more than so many parameters
_LARGE = 2**20
_SEEDS = 16  # by which it is seen that a collate_fn draws
_TRIED = 2  # of its batches
_LEAST = 1e-3  # the share of the smallest numbers that a model may draw
_INNER = (0.25, 0.5)  # shares of others, of the first item
_MIDDLE = 0.5
_EXACT = 1e-6  # the share of the largest value by which a gradient may change in float64


class PaddingTrial:
    """The trial of the data set of a loop, whose batches `join` makes.

    It is made at the first batch in which examples have different shapes, and later ever more
    seldom. A batch of one shape says nothing.
    """

    def __init__(self, dataset: Any, join: Callable[[list[Any]], Batch]) -> None:
        self._dataset = dataset
        self._join = join
        self._seen = set[Shapes]()  # shapes of batches
        self._pieces = 0
        self._is_tried = False
        self._waits = False  # a trial, until one ends without an error

    def check(self, objective: Objective, batch: Batch, places: Sequence[int]) -> None:
        """Raises ValueError: padding changes an example's gradient. `places`: of the examples of
        the batch in the data set."""
        self._pieces += 1
        is_due = self._pieces >= _FIRST_LOOK and not self._pieces & (self._pieces - 1)
        shapes = _shapes(batch)
        is_new = shapes not in self._seen and len(self._seen) < _LOOKS
        self._seen.add(shapes)
        self._waits |= is_due or (is_new and not self._is_tried)
        if not self._waits:
            return
        is_kept = True
        with suppress(*CONFUSED):
            is_kept = self._are_kept(objective, *self._of_other_shapes(places, shapes))
        if not is_kept:
            raise ValueError(
                "collate_fn: it pads the examples of a batch to the longest, or cuts them to the "
                "shortest, which changes their gradients (a mean over all positions, an LSTM's "
                "last step), so that one example would move those of all others: mask the padding "
                "in the model and the loss, or pad or cut to a fixed length that does not depend "
                "on the data"
            )
        self._waits = False

    def _are_kept(self, objective: Objective, short: list[Any], longer: Any) -> bool:
        """False if padding to a longer item changes the gradient of a shorter one. They are tried
        until some have told something."""
        told = 0
        is_large = sum(each.numel() for each in objective.parameters) > _LARGE
        at_first = _OF_LARGE if is_large else _AT_FIRST
        enough = _SHORT if self._is_tried else at_first
        for item in short:
            is_kept = None
            with suppress(*CONFUSED):  # alone it may be too short for the model
                is_kept = self._is_kept(objective, item, longer, told)
            if is_kept is False:
                return False
            told += is_kept is not None
            if told == enough:
                break
        self._is_tried |= told > 0
        return True

    def _of_other_shapes(self, places: Sequence[int], whole: Shapes) -> tuple[list[Any], Any]:
        """Items of other shapes than the largest, those of different shapes first, and one of the
        largest; none if all have the same."""
        found = dict[Shapes, list[Any]]()
        for number, place in enumerate(places):
            if number >= _ITEMS and (len(found) > 1 or whole in found):
                break
            with seeded(0):
                item = self._dataset[place]
            some = found.setdefault(_shapes(self._joined([item], 0)), [])
            if number < _ITEMS or not some:
                some.append(item)
        if len(found) < 2:
            return [], None
        *short, longest = sorted(found, key=lambda shapes: sum(each.numel() for each in shapes))
        spread = dict.fromkeys((0, len(short) - 1, len(short) // 2, *range(len(short))))
        groups = [found[short[place]] for place in spread]
        firsts = [group[0] for group in groups]
        return [*firsts, *(item for group in groups for item in group[1:])], found[longest][0]

    def _is_kept(self, objective: Objective, item: Any, longer: Any, told: int) -> bool | None:
        """True if an item has the same gradient alone as joined with a longer one; None if that
        tells nothing. In float64, as a little from each of many examples is much in a sum. `told`:
        the number of items before it."""
        model = objective.model
        alone = [self._joined([each], 0) for each in (item, longer)]
        pair = _Pair(alone, [self._joined([item, longer], seed) for seed in range(_SEEDS)])
        with suppress(*CONFUSED), in_float64(model):
            exact = _Gradients(objective_of(model, objective.loss), _EXACT, DrawsAt(_MIDDLE))
            return _is_kept_by(exact, pair, told)
        return _is_kept_by(
            _Gradients(objective, agreement(objective), DrawsAt(_MIDDLE)), pair, told
        )

    def _joined(self, items: list[Any], seed: int) -> Batch:
        with seeded(seed):
            return self._join(list(items))


@dataclass
class _Gradients:
    """Gradients of single examples, which are repeated with the same draws.

    Attributes:
      objective: the model and the loss.
      part: the share of the largest value by which equal gradients may differ.
      draws: what the model draws.
    """

    objective: Objective
    part: float
    draws: DrawsAt

    def of(self, batch: Batch) -> Tensor:
        """The gradient of a batch of one example, (number of parameters,)."""
        objective = self.objective
        device = objective.parameters[0].device
        batch = tree_map(lambda part: part if part is None else part.to(device), batch)
        if objective.dtype == torch.float64:
            batch = with_floats(Tensor.double, batch)
        objective = replace(
            objective, memory=memory_for(objective.modules, objective.loss, whole=False)
        )
        with objective.put_back(), same_chance(device), self.draws, exact_products(device):
            parts = plain_gradient(objective, *trees_of(*batch))
        return torch.cat([part.detach().flatten().to(objective.dtype) for part in parts])

    def are_among(self, rows: Iterable[Batch], wanted: Tensor) -> bool:
        """True if one of the rows has a gradient. They may be in another order than the items."""
        return any(self.agree(wanted, self.of(row)) for row in rows)

    def agree(self, one: Tensor, other: Tensor) -> bool:
        """True if two gradients are the same."""
        return not differ(one, other, self.part)


class _Pair(NamedTuple):
    """An item and a longer one. `alone`: a batch of each. `joined`: batches of both, made with
    different draws."""

    alone: list[Batch]
    joined: list[Batch]


def _is_kept_by(gradients: _Gradients, pair: _Pair, told: int) -> bool | None:
    """As `PaddingTrial._is_kept`. The first items are tried thoroughly: also the longer one, and,
    if the model draws, with several draws: by some it may read padding, by others not."""
    is_first = told < _SHORT
    is_kept = _is_kept_once(gradients, pair, with_longer=is_first)
    if not gradients.draws.is_used or is_kept is False or not is_first:
        return is_kept
    inner = (least + told / _SHORT / 4 for least in _INNER)
    for number, share in enumerate((_LEAST, *inner, 1 - _LEAST)):
        draws = DrawsAt(share, rising=number % 2 > 0)
        found = _is_kept_once(replace(gradients, draws=draws), pair, with_longer=True)
        if found is False:
            return False
        is_kept = is_kept or found
    return is_kept


def _is_kept_once(gradients: _Gradients, pair: _Pair, *, with_longer: bool) -> bool | None:
    alone, joined = pair
    if any(_is_cut(_shapes(joined[0]), _shapes(each)) for each in alone):
        return False
    if any(strangers(joined[0], other) for other in joined):
        return _is_kept_if_cut(gradients, joined, _shapes(alone[0]))
    rows = _rows(joined[0])
    wanted = gradients.of(alone[0])
    if not gradients.are_among(rows, wanted):
        return False
    if with_longer and not gradients.are_among(reversed(rows), gradients.of(alone[1])):
        return False
    return True if _tells(wanted) else None


def _shapes(batch: Batch) -> Shapes:
    """The shapes of the examples of a batch."""
    return tuple(part.shape[1:] for part in batches_in(batch) if isinstance(part, Tensor))


def _is_cut(joined: Shapes, alone: Shapes) -> bool:
    """True if an example is shorter in a batch than alone."""
    pairs = zip(joined, alone, strict=True)
    return any(size < own for some, other in pairs for size, own in zip(some, other, strict=True))


def _cut(row: Batch, shapes: Shapes) -> Iterator[Batch]:
    """A row without the padding behind it, and without that before it; nothing if it is shorter
    than that."""
    for is_behind in (True, False):
        sizes = iter(shapes)

        def part(value: Any, is_behind: bool = is_behind, sizes: Iterator[Any] = sizes) -> Any:
            if not isinstance(value, Tensor):
                return value
            for dim, size in enumerate(next(sizes), 1):
                value = value.narrow(dim, 0 if is_behind else value.shape[dim] - size, size)
            return value

        with suppress(RuntimeError):
            yield mapped(part, row)


def _is_kept_if_cut(gradients: _Gradients, joined: list[Batch], shapes: Shapes) -> bool | None:
    """True if in each batch of an item, which alone has these shapes, and a longer one a row keeps
    its gradient when it is cut to the shapes; None if none tells anything. So it is for a
    collate_fn that draws: for the item alone it would draw other numbers."""
    tried = 0
    for batch in joined:
        if tried == _TRIED:
            break
        rows = [(row, gradients.of(row)) for row in _rows(batch)]
        if all(_tells(gradient) for _, gradient in rows):
            pairs = [(wanted, cut) for row, wanted in rows for cut in _cut(row, shapes)]
            if not any(gradients.agree(wanted, gradients.of(cut)) for wanted, cut in pairs):
                return False
            tried += 1
    return True if tried else None


def _rows(batch: Batch) -> list[Batch]:
    return [rows_of(batch, [place]) for place in range(count_of(batch))]


def _tells(gradient: Tensor) -> bool:
    """False for a gradient that is zero with any padding, or is left out of sums."""
    return bool(gradient.isfinite().all() and gradient.any())
