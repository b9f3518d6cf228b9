"""Several uses of one parameter become one term: an example's contributions add up before their norm is taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from discreet.privacy.ghost.terms import Entry, Lookup, Outer, Rows, Slot, Term
from discreet.privacy.ghost.uncovered import Uncovered


def _merge_parts(parts: list[Outer | Rows | Lookup]) -> Outer | Rows | Lookup:
    """One term for terms of the same slot: along the positions where that works, else by building the gradients."""
    if len(parts) == 1:
        return parts[0]
    slot = parts[0].slot
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(lookups) == len(parts):
        return Lookup(slot, torch.cat([p.ids for p in lookups], 1), torch.cat([p.grads for p in lookups], 1))
    outers = [p.as_outer() if isinstance(p, Lookup) else p for p in parts if not isinstance(p, Rows)]
    rows = [part.values.reshape(part.values.shape[0], -1) for part in parts if isinstance(part, Rows)]
    if not outers:
        return Rows(slot, torch.stack(rows).sum(0))
    outer = Outer(slot, torch.cat([p.inputs for p in outers], 1), torch.cat([p.grads for p in outers], 1))
    return outer if not rows else Rows(slot, outer.built().values.flatten(1) + torch.stack(rows).sum(0))


def merge(entries: Sequence[Entry], order: int) -> list[Term]:
    """Terms of distinct parameters, each in its cheapest form for norms of this order. Single uses pass unchanged."""
    used = [slot.index for entry in entries for slot in entry.slots()]
    if len(set(used)) == len(used):
        return [entry.ready(order) for entry in entries]
    groups: dict[Slot, list[Outer | Rows | Lookup]] = defaultdict(list)
    for entry in entries:
        for part in entry.split():
            groups[part.slot].append(part)
    if len({slot.index for slot in groups}) < len(groups):
        raise Uncovered("one parameter serves two kinds of layer")
    return [_merge_parts(parts).ready(order) for parts in groups.values()]
