"""A mechanism from outside with a number of its own: each coordinate is clipped to [-width, width],
and the sum gets Gaussian noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

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
from discreet.settings.adjacency import USER
from discreet.settings.client_settings import UNBOUND, ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.privacy import PLANNED, Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class Box:
    run: ClientSettings = UNBOUND
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    _: KW_ONLY
    noise_multiplier: float | None = None
    width: float = 0.01
    guarantee: ClassVar[str] = USER
    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER,))
    answers: ClassVar[None] = None
    accountants: ClassVar[tuple[str, ...]] = ACCOUNTANTS
    participation: ClassVar[Participation] = IN_THE_CLEAR

    def norm(self) -> float:
        return self.width * math.sqrt(self.sizes.num_params)

    def statement(self) -> Statement:
        return Statement(
            "all data of one client",
            "add or remove one client",
            "the server",
            "who sees every model",
            f"coordinates within {self.width:g}, Gaussian noise on their sum",
            "a Poisson-sampled Gaussian a round",
            (),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        return {"privacy.user.noise_multiplier": self.run.user.noise_multiplier}

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        return ExpectedNoise(noise_of(self.run), self.norm(), self.run.expected_cohort, "width")

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        return poisson_round_event(self.run.user.probability, noise_multiplier=noise_of(self.run))

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(
            noise_of(self.run), bounded=lambda rows, _: (self.within(rows), torch.zeros(len(rows)))
        )

    def within(self, updates: Tensor) -> Tensor:
        return updates.clamp(-self.width, self.width)

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        total = CohortSum(ClippedSum(state.params.numel(), self.norm()))
        for reply in map(in_the_clear, replies):
            if isinstance(reply, PartialReply):
                total.take(reply)
            elif isinstance(reply, UpdateRows):
                total.take(UpdateRows(self.within(reply.updates), reply.below))
            else:
                update = self.within(reply.update).unsqueeze(0)
                total.take(UpdateRows(update, torch.tensor([reply.below])))
        return total

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        noised = summed.clipped.noised(Gaussian(noise_of(self.run)), source.child("update"))
        return Released(noised, state.clip_norm, None, summed.replies)
