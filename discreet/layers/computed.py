"""Weights that a forward computes from parameters alone, such as standardised or normed ones, or a
transposed or merged matrix. They are computed once for all examples.

The gradients of such a weight W = f(P), an example's G, are those of any other weight. The gradient
of P is f'(P)^T G, which is linear in G, so autograd takes it back for many examples at once. It is
built for some examples at a time, once for the norms and once for the sum, by the same operations:
the vector that is summed is the vector that was measured, whatever f is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from discreet.layers.refusals import COPYING, Needs, place
from discreet.layers.terms import (
    Lookup,
    Outer,
    Parts,
    Rows,
    Slot,
    Term,
    Tied,
    floats_at_once,
    mass,
    without,
)

_FLOATS = 2**22  # built at once: 16 MB
# A weight of this many floats is taken back for one example at a time: where a function has no rule
# for batches, autograd runs it so anyway, and copies each result.
_LARGE = 2**18


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A weight that is computed from trainable parameters: from `of`. Its own slot has a negative
    index."""

    value: Tensor
    slot: Slot
    of: Mapping[int, tuple[Slot, Tensor]]  # by index

    @property
    def at_once(self) -> int:
        """The number of examples whose gradients are taken back at once."""
        size = self.value.numel()
        if size >= _LARGE:
            return 1
        return max(1, floats_at_once(_FLOATS, self.value.device) // size)

    def taken_back(self, grads: Tensor) -> Sequence[Tensor]:
        """Gradients of the weight, (k, *shape) for k up to `at_once`, as those of its parameters,
        (k, ...) each."""
        is_batch = self.at_once > 1
        given = grads.to(self.value.dtype)
        found = torch.autograd.grad(
            self.value,
            [parameter for _, parameter in self.of.values()],
            given if is_batch else given[0],
            retain_graph=True,
            is_grads_batched=is_batch,
            allow_unused=True,
            materialize_grads=True,
        )
        return found if is_batch else [each.unsqueeze(0) for each in found]


class ComputedWeights:
    """The weights that a forward has computed."""

    def __init__(self) -> None:
        self.all = list[Computed]()
        self._of = dict[int, Computed]()  # by identity

    def slot(self, value: Any) -> Slot | None:
        """The slot of a computed weight, None for another value."""
        found = self._of.get(id(value))
        return None if found is None else found.slot

    def noted(self, result: Any, given: Sequence[Tensor], slots: Mapping[int, Slot]) -> Any:
        """The result of a function of the given tensors, some of them parameters with `slots`.
        Raises Needs for a result that may hide a tensor."""
        of = dict[int, tuple[Slot, Tensor]]()
        for value in given:
            if id(value) in self._of:
                of |= self._of[id(value)].of
            elif id(value) in slots:
                slot = slots[id(value)]
                of[slot.index] = slot, value
        leaves, _ = tree_flatten(result)
        if not all(isinstance(each, Tensor | int | float | str | None) for each in leaves):
            raise Needs(COPYING, f"a {type(result).__name__} of parameters{place()}")
        for each in leaves:
            is_known = id(each) in slots or id(each) in self._of
            if isinstance(each, Tensor) and each.requires_grad and not is_known:
                weight = Computed(each, Slot(-1 - len(self.all), each.shape), of)
                self.all.append(weight)
                self._of[id(each)] = weight
        return result


@dataclass(frozen=True, slots=True)
class TakenBack:
    """The gradients of the parameters of a computed weight, from the term of the weight: zeros for
    the examples where `lost`, (n,) bool, is true."""

    weight: Computed
    term: Term
    lost: Tensor | None = None

    @property
    def is_small(self) -> bool:
        """True if the gradients of all examples can be built at once."""
        return count_in(self.term) * self.weight.value.numel() <= _FLOATS

    def check(self) -> None:
        """Raises RuntimeError: autograd can't take several gradients back at once."""
        self.weight.taken_back(torch.zeros_like(self.weight.value).unsqueeze(0))

    def mass(self, order: int) -> Tensor:
        return torch.cat(
            [
                reduce(torch.add, (mass(values.flatten(1), order) for values in grads))
                for _, grads in self._built()
            ]
        )

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        for some, grads in self._built():
            for (slot, _), values in zip(self.weight.of.values(), grads, strict=True):
                slot.add(parts, weights[some] @ values.flatten(1))

    def rows(self) -> list[Rows]:
        """The built gradients of all examples."""
        found = zip(*(grads for _, grads in self._built()), strict=True)
        slots = [slot for slot, _ in self.weight.of.values()]
        return [Rows(slot, torch.cat(parts)) for slot, parts in zip(slots, found, strict=True)]

    def _built(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Some examples, and their gradients of each parameter."""
        step = self.weight.at_once
        for start in range(0, count_in(self.term), step):
            some = slice(start, start + step)
            rows = some_of(self.term, some).built()
            grads = self.weight.taken_back(rows.slot.plain(rows.values))
            built = [values.to(rows.values.dtype) for values in grads]
            if self.lost is not None:  # an infinite slope would make NaN of zeros before it
                built = [without(Rows(rows.slot, each), self.lost[some]).values for each in built]
            yield some, built


def some_of(term: Any, some: slice) -> Any:
    """The same term for some of the examples."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[some]
        return some_of(value, some) if isinstance(value, Lookup | Outer) else value

    return replace(term, **{each.name: part(getattr(term, each.name)) for each in fields(term)})


def count_in(term: Any) -> int:
    """The number of examples of a term."""
    values = term.outer.grads if isinstance(term, Tied) else getattr(term, "grads", None)
    return len(term.values if values is None else values)
