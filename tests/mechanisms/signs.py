"""A mechanism from outside Discreet: each client sends the signs of its update, and the server
noises their sum.

Adding or removing one client moves a sum of vectors of num_params signs by at most sqrt(num_params)
in L2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from discreet.accounting.events import ACCOUNTANTS, poisson_round_event
from discreet.mechanisms.central_gaussian import noise_of
from discreet.mechanisms.mechanism import (
    IN_THE_CLEAR,
    SERVER,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
)
from discreet.mechanisms.round_state import Released, RoundState
from discreet.mechanisms.sums import CohortSum, PartialReply, Replies, UpdateRows, in_the_clear
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TrainReply
from discreet.settings.adjacency import USER
from discreet.settings.client_settings import UNBOUND, ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.privacy import PLANNED, Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class Signs:
    """All data of one client, from whoever sees the released models; the server is trusted."""

    run: ClientSettings = UNBOUND
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    _: KW_ONLY
    noise_multiplier: float | None = None  # given in code; in a run it is that of the run
    guarantee: ClassVar[str] = USER
    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER,))
    answers: ClassVar[None] = None
    accountants: ClassVar[tuple[str, ...]] = ACCOUNTANTS
    participation: ClassVar[Participation] = IN_THE_CLEAR

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
    def price_settings(self) -> Mapping[str, object]:
        return {"privacy.user.noise_multiplier": self.run.user.noise_multiplier}

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        size = math.sqrt(self.sizes.num_params)
        return ExpectedNoise(
            noise_of(self.run), size, self.run.expected_cohort, "the norm of a vector of signs"
        )

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        return poisson_round_event(self.run.user.probability, noise_multiplier=noise_of(self.run))

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(
            noise_of(self.run),
            bounded=lambda updates, _: (updates.sign(), torch.zeros(len(updates))),
        )

    def add_up(self, replies: Replies, state: RoundState) -> SignSum:
        """Whatever a client sends, it moves the sum by at most sqrt(num_params) in L2."""
        total = SignSum(state.params.numel())
        for reply in replies:
            total.take(in_the_clear(reply))
        return total

    def release(self, summed: SignSum, state: RoundState, source: RandomSource) -> Released:
        """Gaussian noise of standard deviation z * sqrt(num_params) on the sum of signs."""
        noised = summed.sum.clipped.noised(Gaussian(noise_of(self.run)), source.child("update"))
        return Released(noised, state.clip_norm, None, summed.sum.replies)


class SignSum:
    """Adds up signs."""

    def __init__(self, num_params: int) -> None:
        self.sum = CohortSum(ClippedSum(num_params, math.sqrt(num_params)))

    def take(self, reply: TrainReply | UpdateRows | PartialReply) -> None:
        if isinstance(reply, PartialReply):
            self.sum.take(reply)
        elif isinstance(reply, UpdateRows):
            self.sum.take(UpdateRows(reply.updates.sign(), reply.below))
        else:
            signs = reply.update.sign().unsqueeze(0)
            self.sum.take(UpdateRows(signs, torch.tensor([reply.below])))

    def part(self) -> PartialReply:
        return self.sum.part()
