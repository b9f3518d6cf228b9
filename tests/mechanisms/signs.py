"""A mechanism from outside Discreet: each client sends the signs of its update, and the server noises their sum.

Adding or removing one client moves a sum of vectors of num_params signs by at most sqrt(num_params) in L2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from discreet.accounting.events import poisson_round_event
from discreet.mechanisms.mechanism import NOT_COVERED, ClientRound, Statement, expected_cohort
from discreet.mechanisms.sums import CohortSum, PartialReply, Released, Replies, Round, take_all
from discreet.privacy.mechanisms import Gaussian
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import PLANNED, USER, ClipConfig, Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class Signs:
    """All data of one client, from whoever sees the released models; the server is trusted."""

    run: ClientSettings
    guarantee: ClassVar[str] = USER
    masked: ClassVar[bool] = False
    at_server: ClassVar[bool] = True
    at_client: ClassVar[bool] = False
    batched: ClassVar[bool] = True
    reported: ClassVar[tuple[str, ...]] = ()
    deciding: ClassVar[tuple[str, ...]] = ("privacy.user.noise_multiplier",)
    decided: ClassVar[Mapping[str, object]] = {}
    finite: ClassVar[tuple[str, ...]] = ()
    grid_slack: ClassVar[None] = None
    only_rdp: ClassVar[bool] = False
    fixed_norm: ClassVar[str] = "the norm of a vector of signs"

    def statement(self, *, account: bool = False) -> Statement:
        return Statement(
            unit="all data of one client",
            adjacency="add or remove one client",
            trusted="the server",
            observer="who sees every released model, but not who takes part",
            mechanism="signs of updates, Gaussian noise on their sum",
            accounting="a Poisson-sampled Gaussian a round",
            not_covered=(*NOT_COVERED, "who took part in a round, and how many replied"),
        )

    def event(
        self, noise_multiplier: float, *, trains: bool = True, rates: bool = False, sizes: Sizes = PLANNED
    ) -> DpEvent:
        return poisson_round_event(self.run.user.probability, noise_multiplier=noise_multiplier)

    def server_release(self, clip: ClipConfig, sizes: Sizes = PLANNED, *, rates: bool = False) -> SignRelease:
        noise = self.run.user.noise_multiplier
        assert noise is not None
        return SignRelease(noise, self.event(noise), math.sqrt(sizes.num_params))

    def client_round(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(self.run.user.noise_multiplier or 0.0)

    def answer_noise(self, l1_norm: float = 1.0) -> None:
        """It is asked for no answers."""

    def bounded(self, updates: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
        return updates.sign(), torch.zeros(len(updates), dtype=torch.bool)

    @property
    def noise_in_sum(self) -> float:
        return self.run.user.noise_multiplier or 0.0

    @property
    def averaged(self) -> float:
        return expected_cohort(self.run)


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


@dataclass(frozen=True)
class SignRelease:
    """The server's release: Gaussian noise of standard deviation z * sqrt(num_params) on the sum of signs."""

    sum_noise: float
    event: DpEvent
    length: float
    guarantee: ClassVar[str] = USER
    masked: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    clipping: ClassVar[None] = None

    def norm(self, clip_norm: float) -> float:
        return self.length

    def empty(self, num_params: int, clip_norm: float) -> Any:
        return SignSum(num_params)

    def release(self, replies: Replies, at: Round) -> Released:
        total = SignSum(at.num_params)
        take_all(replies, total, None)
        at.charge(self.event)
        noised = total.sum.clipped.noised(Gaussian(self.sum_noise), at.source.child("update"))
        return Released(noised, at.clip_norm, None, total.sum.replies)

    def rate(self, replies: Replies, at: Round, event: DpEvent | None) -> Any:
        raise ValueError("clients that send signs rate no models")
