"""A run without any guarantee: it averages updates without clipping or noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from discreet.mechanisms.mechanism import (
    IN_THE_CLEAR,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
    unnoised_at_server,
)
from discreet.mechanisms.round_state import Released
from discreet.settings.client_settings import ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.privacy import PLANNED, Sizes

if TYPE_CHECKING:
    from discreet.mechanisms.round_state import RoundState
    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.randomness import RandomSource


@dataclass(frozen=True)
class Unprotected:
    """Protects nothing: nothing is clipped, noised or charged.

    Attributes:
      run, clip, sizes: as `CentralGaussian` has them.
    """

    run: ClientSettings
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    guarantee: ClassVar[str] = "none"
    charged_at: ClassVar[frozenset[str]] = frozenset()

    def statement(self) -> Statement:
        return Statement("nothing", "none", "everybody", "nobody", "none", "none", ())

    @property
    def price_settings(self) -> Mapping[str, object]:
        return {}

    @property
    def accountants(self) -> tuple[str, ...]:
        return ()

    @property
    def participation(self) -> Participation:
        return IN_THE_CLEAR

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        return unnoised_at_server(self.run)

    def event(self, number: int, *, again: bool = False) -> None:
        """None: nobody pays."""

    @property
    def answers(self) -> None:
        """None: no guarantee pays for answers."""

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(0.0)

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        from discreet.mechanisms.sums import add_up_unnoised

        return add_up_unnoised(replies, state, None)

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        """The sum unchanged."""
        from discreet.mechanisms.sums import release_unnoised

        return release_unnoised(summed, state, source)
