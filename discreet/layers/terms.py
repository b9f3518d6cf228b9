"""Terms: the contribution of one use of a parameter to the gradients of a batch, without building
those gradients.

A term stands for n per-example gradients of one parameter (or of a weight and its bias). It gives
the mass that they add to each example's norm, and it adds their weighted sum to the parameter's
part of a flat vector. For a matrix product the gradient of example i is B_i^T A_i, with A the
layer's inputs and B the gradients at its outputs, so its norm needs no built gradient:
||b a^T|| = ||b|| ||a|| for one position (Goodfellow 2015, arXiv 1510.01799), and
||B^T A||^2 = sum_st (A A^T)_st (B B^T)_st for several (Li et al. 2022, arXiv 2110.05679,
section 4). The sums then use A and B again (book-keeping: Bu et al. 2022, arXiv 2210.00038).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

# The fast norm loses precision on long rows (4e-4 of the norm of a million equal entries). Those
# use a slower routine with pairwise summation.
_LONGEST_FAST_ROW = 1024
_SHORT_ROW = 64  # many shorter ones are several times slower
# The cost of a float of a built gradient, in flops; the second number if a batch has many (memory).
_FLOPS_PER_STORED_FLOAT = 48
_FLOPS_PER_FAR_FLOAT = 160
_NEAR_FLOATS = 2**19
_PROCESSOR = "cpu"
# A GPU has memory for this many, 1 GB, and is slow on small pieces.
_GPU_FLOATS = 2**28
# Entries of the table that maps an id to a place, in 32 bits: 2 MB.
_TABLE_ENTRIES = 2**19
_SHORT = 2**12  # floats of a gradient that is put beside others, for fewer calls
# Gram matrices lose small norms by cancellation. This share of the largest possible norm is added,
# so that no norm is underestimated.
_GRAM_MARGIN = 1e-6
# A longer factor of a gradient counts as infinite; in L2 its square overflows float32. A shorter
# factor can't amplify rounding errors in the other's smallest floats to a norm that matters.
_LONGEST_FACTOR = 2.0**64


def is_processor(device: torch.device) -> bool:
    """True if small pieces that stay in a cache, and channels last, are faster. A GPU needs few
    calls instead: it waits for each."""
    return device.type == _PROCESSOR


def floats_at_once(on_processor: int, device: torch.device) -> int:
    """The number of floats of an intermediate result that are held at once: as many as fit a
    processor's cache, or a GPU's memory."""
    if is_processor(device):
        return on_processor
    return max(on_processor, _GPU_FLOATS)


def _norms(values: Tensor, order: int) -> Tensor:
    """L1 or L2 norms over all dimensions but the first: (n, ...) -> (n,)."""
    while values.dim() > 1:
        if values.dim() > 2 and values.shape[-1] * values.shape[-2] <= _LONGEST_FAST_ROW:
            values = values.flatten(-2)
        elif values.dim() > 2 and (some := _rows_at_once(*values.shape[-2:])) > 1:
            count, width = values.shape[-2:]
            values = values.reshape(*values.shape[:-2], count // some, some * width)
        elif order == 1:
            values = values.abs().sum(-1)
        elif values.shape[-1] > _LONGEST_FAST_ROW:
            values = torch.linalg.vecdot(values, values).sqrt()
        else:
            values = torch.linalg.vector_norm(values, dim=-1)
    return values


def mass(values: Tensor, order: int) -> Tensor:
    """The L1 norm or the squared L2 norm, which add up over the parameters of an example: (n, ...)
    -> (n,).

    The result is at least the true one, up to rounding, at any scale: the underflow of the squares
    of the smallest floats is added, since another factor may multiply it.
    """
    norms = _norms(values, order)
    if order == 1:
        return norms.masked_fill(norms >= _LONGEST_FACTOR, math.inf)
    entries = values.numel() // max(1, values.shape[0])
    lost = _lost_squares(2 * entries, values.dtype, values.device)
    return torch.addcmul(lost, norms, norms)


@lru_cache(maxsize=256)
def _rows_at_once(count: int, width: int) -> int:
    """The number of short rows that are put end to end, so that they are fast: a divisor of
    their count."""
    if width > _SHORT_ROW:
        return 1
    most = _LONGEST_FAST_ROW // max(1, width)
    return next(some for some in range(min(most, count), 0, -1) if count % some == 0)


@lru_cache(maxsize=256)
def _lost_squares(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The largest loss of a sum of `count` squares, if each is below the smallest normal float."""
    return torch.tensor(count * torch.finfo(dtype).tiny, dtype=dtype, device=device)


class Parts:
    """A flat vector in pieces of the parameters' shapes, of a type and on the device of `like`, in
    uninitialised memory.

    What comes first to a piece overwrites it: short values at the end, all in one call, others at
    once. Zeroing all pieces would take as long as one of a small model's products.
    """

    def __init__(self, shapes: Sequence[torch.Size], like: Tensor, dtype: torch.dtype) -> None:
        sizes = [shape.numel() for shape in shapes]
        self._total = like.new_empty(sum(sizes), dtype=dtype)
        pairs = zip(torch.split_with_sizes(self._total, sizes), shapes, strict=True)
        self._values = [piece if len(shape) == 1 else piece.view(shape) for piece, shape in pairs]
        self._unwritten = set(range(len(sizes)))
        self._waiting = dict[int, Tensor]()

    def __getitem__(self, index: int) -> Tensor:
        if index in self._waiting:
            self._values[index].copy_(self._waiting.pop(index))
        elif index in self._unwritten:
            self._values[index].zero_()
        self._unwritten.discard(index)
        return self._values[index]

    def add(self, index: int, values: Tensor) -> None:
        """Adds values, of the piece's shape, to a piece."""
        if index not in self._unwritten:
            self[index].add_(values)
            return
        self._unwritten.discard(index)
        if values.numel() > _SHORT:
            self._values[index].copy_(values)
        else:
            self._waiting[index] = values

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        """Adds left @ right to a piece as a matrix."""
        keep = int(index not in self._unwritten)
        piece = self[index] if keep else self._values[index]
        self._unwritten.discard(index)
        piece.view(len(left), -1).addmm_(left, right, beta=keep)

    def total(self) -> Tensor:
        """The flat vector, (num_params,), zero if nothing was added."""
        if self._waiting:
            pieces = [self._values[index] for index in self._waiting]
            torch._foreach_copy_(pieces, list(self._waiting.values()))
            self._waiting.clear()
        while self._unwritten:
            self._values[self._unwritten.pop()].zero_()
        return self._total


@dataclass(frozen=True, slots=True)
class Slot:
    """The index of a parameter among the trainable ones, and its shape.

    `kernel_last`: values come as (out, *kernel, in), the layout of patches, not as (out, in,
    *kernel)."""

    index: int
    shape: torch.Size
    kernel_last: bool = False

    def plain(self, rows: Tensor) -> Tensor:
        """Gradients (n, ...) converted from this slot's layout to the parameter's, (n, *shape)."""
        if not self.kernel_last:
            return rows.reshape(-1, *self.shape)
        out, width, *kernel = self.shape
        return rows.reshape(-1, out, *kernel, width).movedim(-1, 2)

    def add(self, parts: Parts, values: Tensor) -> None:
        """Adds values, in this slot's layout, to the parameter's part."""
        parts.add(self.index, self.plain(values.unsqueeze(0))[0])

    def add_product(self, parts: Parts, grads: Tensor, inputs: Tensor) -> None:
        """Adds grads @ inputs, from (p, m) and (m, d), without a copy if the layout
        allows."""
        if self.kernel_last:
            self.add(parts, grads @ inputs)
        else:
            parts.add_product(self.index, grads, inputs)


class Term(Protocol):
    """n per-example gradients of one parameter, ready for norms and sums.

    It is a dataclass. The first dimension of its float tensors is that of the examples; see
    `without`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def mass(self, order: int) -> Tensor:
        """The parameter's part of each example's L1 norm (order 1) or squared L2 norm (order 2),
        (n,)."""

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        """Adds sum_i weights_i g_i to the parameter's part; weights (n,)."""


def without(term: Any, lost: Tensor) -> Any:
    """The same term with zeros for the examples where `lost`, (n,) bool, is true: their gradients
    are then zero."""

    if hasattr(term, "lost"):  # it builds its gradients when they are needed
        return replace(term, lost=lost)

    def kept(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.masked_fill(lost.view(-1, *[1] * (value.dim() - 1)), 0)
        if hasattr(value, "add_to"):  # a term within a term
            return without(value, lost)
        return value

    return replace(term, **{each.name: kept(getattr(term, each.name)) for each in fields(term)})


@dataclass(frozen=True, slots=True)
class Rows:
    """Built gradients: values (n, ...)."""

    slot: Slot
    values: Tensor

    def built(self) -> Rows:
        return self

    def mass(self, order: int) -> Tensor:
        return mass(self.values if self.values.dim() > 1 else self.values.unsqueeze(1), order)

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        values = self.values.reshape(len(weights), -1)
        self.slot.add_product(parts, weights.unsqueeze(0), values)


@dataclass(frozen=True, slots=True)
class Joined:
    """Short built gradients of several parameters, side by side: values (n, d)."""

    slots: tuple[Slot, ...]
    values: Tensor

    def mass(self, order: int) -> Tensor:
        return mass(self.values, order)

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        sizes = [slot.shape.numel() for slot in self.slots]
        pieces = torch.split_with_sizes(weights @ self.values, sizes)
        for slot, piece in zip(self.slots, pieces, strict=True):
            slot.add(parts, piece)


def joined(terms: list[Term]) -> list[Term]:
    """The terms, the short built gradients among them as one."""
    short = list[Rows]()
    others = list[Term]()
    for term in terms:
        if isinstance(term, Rows) and term.slot.shape.numel() <= _SHORT:
            short.append(term)
        else:
            others.append(term)
    if len(short) < 2:
        return terms
    values = torch.cat([term.values.reshape(len(term.values), -1) for term in short], 1)
    return [Joined(tuple(term.slot for term in short), values), *others]


@dataclass(frozen=True, slots=True)
class Pair:
    """A matrix product with one position an example, and its bias: inputs (n, d), grads (n, p)."""

    weight: Slot | None
    bias: Slot | None
    inputs: Tensor
    grads: Tensor

    def mass(self, order: int) -> Tensor:
        grads = mass(self.grads, order)
        if self.weight is None:
            return grads
        inputs = mass(self.inputs, order)
        if self.bias is None:
            return grads * inputs
        return torch.addcmul(grads, grads, inputs)

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        grads = self.grads.t()
        if self.weight is not None:
            self.weight.add_product(parts, grads * weights, self.inputs)
        if self.bias is not None:
            parts.add_product(self.bias.index, grads, weights.unsqueeze(1))


@dataclass(frozen=True, slots=True)
class Outer:
    """A matrix product over T positions, for L2 norms: inputs (n, T, d), grads (n, T, p). The norms
    come from two Gram matrices."""

    slot: Slot
    inputs: Tensor
    grads: Tensor

    def cheapest(self, order: int) -> Term:
        """This term in the form that is cheapest for norms of this order and the sum."""
        if self.inputs.shape[1] == 1:
            return Pair(self.slot, None, self.inputs[:, 0], self.grads[:, 0])
        count, positions, width = self.inputs.shape
        grams = order == 2 and grams_are_cheaper(count, positions, width, self.grads.shape[2])
        if grams:
            return self
        return self.built()

    def built(self) -> Rows:
        """The built gradients, (n, p, d)."""
        return Rows(self.slot, torch.bmm(self.grads.transpose(1, 2), self.inputs))

    def mass(self, order: int) -> Tensor:
        return gram_mass([self.grams()])

    def grams(self) -> Grams:
        """What L2 norms need of the Gram matrices."""
        factors = (self.inputs, self.grads)
        inputs, grads = grams = [torch.bmm(each, each.transpose(1, 2)) for each in factors]
        squares = torch.stack([gram.diagonal(0, 1, 2) for gram in grams])
        width = max(each.shape[2] for each in factors)
        return Grams(inputs.mul_(grads).sum((1, 2)), squares, width)

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        grads = self.grads * weights.view(-1, 1, 1)
        self.slot.add_product(parts, grads.flatten(0, 1).t(), self.inputs.flatten(0, 1))


class Grams(NamedTuple):
    """Of the Gram matrices of inputs and grads: the sum of products of their entries, (n,), their
    diagonals, (2, n, T), and the length of the longer rows."""

    inner: Tensor
    squares: Tensor
    width: int


def gram_mass(found: Sequence[Grams]) -> Tensor:
    """The squared L2 norms of matrix products, added up, (n,): no less than the true ones. Those of
    equally many positions share the calls."""
    sums = list[Tensor]()
    largest = list[Tensor]()
    by_length = defaultdict[int, list[Grams]](list)
    for each in found:
        by_length[each.squares.shape[2]].append(each)
    for some in by_length.values():
        inner, squares, widths = zip(*some, strict=True)
        sums += inner
        # The other Gram matrix may multiply the underflow of one, so the margin covers it too.
        lost = max(widths) * torch.finfo(squares[0].dtype).tiny / _GRAM_MARGIN
        largest.append(torch.stack(squares).add_(lost).prod(1).sqrt_().sum(2))
    bounds = _end_to_end(largest)
    return torch.stack(sums).clamp_(min=0).addcmul_(bounds, bounds, value=_GRAM_MARGIN).sum(0)


def total_mass(terms: Sequence[Any], order: int) -> Tensor:
    """The masses of all terms of a pass, added up, (n,)."""
    grams = [each.grams() for each in terms if hasattr(each, "grams")]
    found = [each.mass(order) for each in terms if not hasattr(each, "grams")]
    if grams:
        found.append(gram_mass(grams))
    mass: Tensor = found[0]
    if len(found) > 1:
        mass = torch.stack(found).sum(0)
    return mass


def grams_are_cheaper(count: int, positions: int, width: int, out: int) -> bool:
    """True if Gram matrices, T^2 (d + p), cost less than stored gradients, d p. Both need a
    product, T d p."""
    if count * width * out <= _NEAR_FLOATS:
        stored = _FLOPS_PER_STORED_FLOAT
    else:
        stored = _FLOPS_PER_FAR_FLOAT
    return 2 * positions**2 * (width + out) < stored * width * out


def _end_to_end(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)


def repeats(ids: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """For each place of ids (n, T), below `entries`, one place of the same example with the same
    id, (n * T,). Before it the places for which that is another one.

    It does not sort: each place is written into a table at its id, and the entry that remains is
    read. The table has rows for some examples at a time; older entries are never read.
    """
    entries = max(entries, 1)
    step = max(1, min(len(ids), _TABLE_ENTRIES // entries))
    table = torch.empty(step * entries, dtype=torch.int32, device=ids.device)
    rows = torch.arange(0, step * entries, entries, device=ids.device).unsqueeze(1)
    places = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
    found = list[Tensor]()
    for some, at in zip(torch.split(ids, step), torch.split(places, step), strict=True):
        keys = (some + rows[: len(some)]).flatten()
        found.append(table.scatter_(0, keys, at.flatten()).index_select(0, keys))
    first = _end_to_end(found)
    return (first != places.flatten()).nonzero().squeeze(1), first


@dataclass(frozen=True, slots=True)
class Lookup:
    """Rows picked from a table: ids (n, T), integers, and grads (n, T, d). Rows picked twice add up
    first."""

    slot: Slot
    ids: Tensor
    grads: Tensor

    def built(self) -> Rows:
        """The built gradients, (n, entries, d)."""
        table = self.grads.new_zeros(len(self.ids), *self.slot.shape)
        places = self.ids.unsqueeze(2).expand(self.grads.shape)
        return Rows(self.slot, table.scatter_add_(1, places, self.grads))

    def mass(self, order: int) -> Tensor:
        if self.ids.shape[1] == 1:
            return mass(self.grads, order)
        again, first = repeats(self.ids, self.slot.shape[0])
        rows = self.grads.flatten(0, 1)
        if len(again):
            rows = rows.index_add(0, first[again], rows[again]).index_fill_(0, again, 0)
        return mass(rows.view(self.grads.shape), order)

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        rows = self.grads * weights.view(-1, 1, 1)
        parts[self.slot.index].index_add_(0, self.ids.flatten(), rows.flatten(0, 1))


@dataclass(frozen=True, slots=True)
class Tied:
    """A table that is used for lookups and in a product, for L2 norms: ||A + B||^2 = ||A||^2 +
    ||B||^2 + 2 <A, B>, without building A or B."""

    lookup: Lookup
    outer: Outer

    @property
    def slot(self) -> Slot:
        """The table's."""
        return self.outer.slot

    def built(self) -> Rows:
        """The built gradients, (n, entries, d)."""
        return Rows(self.slot, self.lookup.built().values + self.outer.built().values)

    def mass(self, order: int) -> Tensor:
        apart = self.lookup.mass(order) + self.outer.mass(order)
        ids = self.lookup.ids
        grads = self.outer.grads
        picked = grads.gather(2, ids.unsqueeze(1).expand(-1, grads.shape[1], -1))
        both = (picked * torch.bmm(self.outer.inputs, self.lookup.grads.transpose(1, 2))).sum(
            (1, 2)
        )
        return apart.add(both, alpha=2).clamp_(min=0).add_(apart, alpha=_GRAM_MARGIN)

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        self.outer.add_to(parts, weights)  # it writes into the table without zeroing it first
        self.lookup.add_to(parts, weights)


def product_terms(
    weight: Slot | None, bias: Slot | None, inputs: Tensor, grads: Tensor, *, turned: bool = False
) -> list[Term]:
    """Terms for outputs = inputs @ weight.T + bias, or with `turned` inputs @ weight + bias.

    Args:
      inputs: (n, d) or (n, T, d).
      grads: (n, p) or (n, T, p).
    """
    inputs = inputs.to(grads.dtype)
    if grads.dim() == 2 and not turned:
        return [Pair(weight, bias, inputs, grads)]
    if grads.dim() == 2:
        inputs = inputs.unsqueeze(1)
        grads = grads.unsqueeze(1)
    terms: list[Term] = [] if bias is None else [Rows(bias, grads.sum(1))]
    if weight is None:
        return terms
    left, right = (grads, inputs) if turned else (inputs, grads)
    return [Outer(weight, left, right), *terms]
