"""A mechanism from outside Discreet: each client sends the signs of its update, and the server noises their sum.

Adding or removing one client moves a sum of vectors of num_params signs by at most sqrt(num_params) in L2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from discreet.accounting.events import poisson_round_event
from discreet.mechanisms.mechanism import Released, Round, ServerMechanism, Statement
from discreet.mechanisms.sums import CohortSum, PartialReply, Replies, take_all
from discreet.privacy.mechanisms import Gaussian
from discreet.settings.privacy import USER

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class Signs(ServerMechanism):
    """All data of one client, from whoever sees the released models; the server is trusted."""

    guarantee: ClassVar[str] = USER
    deciding: ClassVar[tuple[str, ...]] = ("privacy.user.noise_multiplier",)
    fixed_norm: ClassVar[str] = "the norm of a vector of signs"

    def statement(self) -> Statement:
        return Statement(
            unit="all data of one client",
            adjacency="add or remove one client",
            trusted="the server",
            observer="who sees every released model, but not who takes part",
            mechanism="signs of updates, Gaussian noise on their sum",
            accounting="a Poisson-sampled Gaussian a round",
            not_covered=("who took part in a round, and how many replied",),
        )

    @property
    def sum_noise(self) -> float:
        return self.noise_multiplier

    def event(self, noise_multiplier: float, *, trains: bool = True, rates: bool = False) -> DpEvent:
        return poisson_round_event(self.run.user.probability, noise_multiplier=noise_multiplier)

    def bounded(self, updates: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
        return updates.sign(), torch.zeros(len(updates), dtype=torch.bool)

    def norm(self, clip_norm: float) -> float:
        return math.sqrt(self.sizes.num_params)

    def empty(self, num_params: int, clip_norm: float) -> Any:
        return SignSum(num_params)

    def release(self, replies: Replies, at: Round) -> Released:
        """Gaussian noise of standard deviation z * sqrt(num_params) on the sum of signs."""
        total = SignSum(at.num_params)
        take_all(replies, total, None)
        at.charge(self.event(self.noise_multiplier))
        noised = total.sum.clipped.noised(Gaussian(self.noise_multiplier), at.source.child("update"))
        return Released(noised, at.clip_norm, None, total.sum.replies)


class SignSum:
    """Adds up signs: whatever a client sends, it moves the sum by at most sqrt(num_params) in L2."""

    def __init__(self, num_params: int) -> None:
        self.sum = CohortSum(num_params, math.sqrt(num_params), None)

    def add(self, updates: Tensor, below: Tensor) -> None:
        self.sum.add(updates.sign(), below)

    def take(self, reply: Any) -> None:
        if isinstance(reply, PartialReply):
            self.sum.take(reply)
        else:
            self.add(reply.update.unsqueeze(0), torch.tensor([reply.below]))

    def part(self) -> PartialReply:
        return self.sum.part()
