"""What a client answers to a question about its data: blocks of numbers, joined in one vector of L2 norm at most 1.

A question has one or more blocks. Each has a public length and a bound that the L2 norm of no client's block passes,
whatever the client holds. A joined vector holds each block divided by its bound and times a weight, where all blocks
have the same weight and the squares of the weights sum to 1: so the whole has a norm of at most 1, and one Gaussian of
sensitivity 1 pays for all. Blocks are centred where that halves their bound: a share in 0..1 is sent as -1/2..1/2.

A client without examples answers zeros, as one that is missing does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Held:
    """What a client answers from: n examples, at least 1.

    Attributes:
      values: (n, k): a model's outputs, or inputs.
      targets: (n,) or (n, k), as examples have them.
    """

    values: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Block:
    """A part of an answer.

    Attributes:
      name: what is read from it.
      length: how many numbers it has.
      bound: the L2 norm of no client's block is larger.
      answer: of what a client holds, (length,) float64.
      shares: whether the numbers are shares of a whole: none is negative, and they sum to at most `bound` squared.
    """

    name: str
    length: int
    bound: float
    answer: Callable[[Held], Tensor]
    shares: bool = False


def weight_of(blocks: Sequence[Block]) -> float:
    """What each block is multiplied by, beside its bound's inverse; the squares sum to 1."""
    return 1 / math.sqrt(len(blocks))


def length_of(blocks: Sequence[Block]) -> int:
    """Of a joined vector."""
    return sum(block.length for block in blocks)


def joined_answer(blocks: Sequence[Block], values: Tensor, targets: Tensor) -> Tensor:
    """What a client answers, (length,) float64, of L2 norm at most 1.

    Args:
      blocks: at least one.
      values, targets: see `Held`; n may be 0.

    A block that is not finite, or longer than its bound, which only a faulty block could be, is answered as zeros or
    is shortened: the bound is kept by this function and does not rest on its blocks.
    """
    if len(targets) == 0:
        return torch.zeros(length_of(blocks), dtype=torch.float64)
    held, weight = Held(values.detach().cpu().double(), targets.detach().cpu()), weight_of(blocks)
    return torch.cat([_within(block.answer(held), block.bound) * (weight / block.bound) for block in blocks])


def _within(block: Tensor, bound: float) -> Tensor:
    if not block.isfinite().all():
        return torch.zeros_like(block)
    norm = float(block.norm())
    return block * (bound / norm) if norm > bound else block


def bins_of(values: Tensor, low: float, high: float, count: int) -> Tensor:
    """Which of `count` equally wide bins of low..high holds each value: int64 of the same shape. Values outside go to
    the first or the last bin; NaN goes to the first.

    >>> bins_of(torch.tensor([-9.0, 0.0, 0.3, 1.0, torch.nan]), 0, 1, 4).tolist()
    [0, 0, 1, 3, 0]
    """
    places = ((values.double() - low) / (high - low) * count).nan_to_num(0.0, posinf=count, neginf=0.0)
    return places.clamp(0, count - 1).floor().long()
