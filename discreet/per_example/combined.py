"""Terms of one parameter that is used several times, as one: its gradient is the sum of theirs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from discreet.per_example.convolution import Convolved
from discreet.per_example.terms import Lookup, Outer, Pair, Rows, Slot, Term, Tied


def combined(terms: list[Term], order: int) -> list[Term]:
    """Terms of which no two are of one parameter: a parameter that is used several times has one gradient. The list is
    emptied: what several terms hold is let go of when they are one."""
    uses = Counter(slot.index for term in terms for slot in slots_of(term))
    found: list[Term] = []
    shared = defaultdict[int, list[Any]](list)
    while terms:
        term = terms.pop()
        if all(uses[slot.index] == 1 for slot in slots_of(term)):
            found.append(term.cheapest(order) if isinstance(term, Outer | Convolved) else term)
            continue
        for part in _apart(term):
            shared[part.slot.index].append(part)
    del term
    while shared:
        found.append(_one(shared.popitem()[1], order))
    return found[::-1]


def slots_of(term: Any) -> list[Slot]:
    """The parameters that a term is of."""
    slots = [term.weight, term.bias] if isinstance(term, Pair) else [term.slot]
    return [slot for slot in slots if slot is not None]


def _apart(term: Any) -> list[Any]:
    """A term as terms of one parameter each."""
    if not isinstance(term, Pair):
        return [term]
    bias = [] if term.bias is None else [Rows(term.bias, term.grads)]
    weight = None if term.weight is None else Outer(term.weight, term.inputs.unsqueeze(1), term.grads.unsqueeze(1))
    return bias if weight is None else [weight, *bias]


def _one(parts: list[Any], order: int) -> Term:
    """The sum of several terms of one parameter."""
    if all(type(part) is Convolved for part in parts) and len({part.call for part in parts}) == 1:
        inputs, grads = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("inputs", "grads"))
        return replace(parts[0], inputs=inputs, grads=grads).cheapest(order)  # type: ignore[no-any-return]
    parts = [part.outer() if type(part) is Convolved else part for part in parts]
    outers, lookups = ([part for part in parts if type(part) is kind] for kind in (Outer, Lookup))
    slot = parts[0].slot
    joined: list[Any] = []
    if outers:
        inputs, grads = (torch.cat([getattr(part, name) for part in outers], 1) for name in ("inputs", "grads"))
        joined.append(Outer(slot, inputs, grads))
    if lookups:
        ids, grads = (torch.cat([getattr(part, name) for part in lookups], 1) for name in ("ids", "grads"))
        joined.append(Lookup(slot, ids, grads))
    rest = [part for part in parts if type(part) is Rows]
    if not rest:
        if len(joined) == 2:
            return Tied(lookup=joined[1], outer=joined[0])
        return joined[0].cheapest(order) if outers else joined[0]  # type: ignore[no-any-return]
    rest += [part.built() for part in joined]
    if len({part.slot for part in rest}) > 1:
        rest, slot = [Rows(slot, part.slot.plain(part.values)) for part in rest], replace(slot, kernel_last=False)
    return Rows(slot, reduce(Tensor.add, (part.values.reshape(rest[0].values.shape) for part in rest)))
