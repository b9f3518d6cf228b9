"""What a client answers to a question about its data: blocks of numbers, joined in one vector of L2 norm at most 1.

Each block has a public length and a bound that the L2 norm of no client's block passes. A joined vector holds each
block divided by its bound and times a weight, the same for all, whose squares sum to 1: so one Gaussian of sensitivity
1 pays for all. Blocks are centred if that halves their bound: a share in 0..1 is sent as -1/2..1/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the values (n, k) and the targets of at least one example: a block, (length,) float64.
Answer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Block:
    """A part of an answer; `name` says what is read from it. `shares`: its numbers are shares of a whole, none of them
    negative. `total`: what the sum of their sizes never passes, if that is less than `most` would say."""

    name: str
    length: int
    bound: float
    answer: Answer
    shares: bool = False
    total: float | None = None

    @property
    def most(self) -> float:
        """What the L1 norm of no client's block passes: of shares the square of `bound`, of others what their number
        and their L2 norm allow, if `total` is not given."""
        if self.total is not None:
            return self.total
        return self.bound**2 if self.shares else self.bound * math.sqrt(self.length)


def check_names(names: Sequence[str], known: Sequence[str], *, when: str = "") -> None:
    """Raises ValueError unless `names` are different ones of `known`; it names the choices, and `when` they are."""
    unknown = [name for name in names if name not in known]
    if unknown or not names or len({*names}) < len(names):
        why = f" ({unknown[0]} is none of them)" if unknown else ""
        raise ValueError(f"must be a list of different names of {', '.join(known)}{when}{why}")


def weight_of(blocks: Sequence[Block]) -> float:
    """What each block is multiplied by, beside its bound's inverse."""
    return 1 / math.sqrt(len(blocks))


def l1_norm_of(blocks: Sequence[Block]) -> float:
    """What the L1 norm of no joined answer passes.

    >>> l1_norm_of([Block("accuracy", 1, 0.5, lambda *_: torch.zeros(1))])
    1.0
    """
    return weight_of(blocks) * sum(block.most / block.bound for block in blocks)


def joined_answer(blocks: Sequence[Block], values: Tensor, targets: Tensor) -> Tensor:
    """What a client answers, (length,) float64, of L2 norm at most 1: zeros without examples, as one that is missing.
    The bound does not rest on the blocks: one that is not finite is zeros, and one beyond its bound is shortened."""
    if len(targets) == 0:
        return torch.zeros(sum(block.length for block in blocks), dtype=torch.float64)
    values, targets, weight = values.detach().cpu().double(), targets.detach().cpu(), weight_of(blocks)
    return torch.cat([_within(block.answer(values, targets), block.bound) * (weight / block.bound) for block in blocks])


def _within(block: Tensor, bound: float) -> Tensor:
    if not block.isfinite().all():
        return torch.zeros_like(block)
    norm = float(block.norm())
    return block * (bound / norm) if norm > bound else block


def bins_of(values: Tensor, low: float, high: float, count: int) -> Tensor:
    """Which of `count` equally wide bins of low..high holds each value. Those outside, and NaN, go to the nearest bin,
    NaN to the first.

    >>> bins_of(torch.tensor([-9.0, 0.0, 0.3, 1.0, torch.nan]), 0, 1, 4).tolist()
    [0, 0, 1, 3, 0]
    """
    places = ((values.double() - low) / (high - low) * count).nan_to_num(0.0, posinf=count, neginf=0.0)
    return places.clamp(0, count - 1).floor().long()


def shares_of(places: Tensor, count: int) -> Tensor:
    """For each column of places (n, k) the share of rows at each of `count` places: (k * count,), norm <= sqrt(k)."""
    counts = torch.stack([torch.bincount(column, minlength=count) for column in places.T])
    return (counts.double() / len(places)).reshape(-1)
