"""A simulation of guarded sites: each client is a block of patients, and one patient moves the sum
by 2C.

It has the mechanism of `discreet.guard.block_release`, with one noise that all sites share, as in
`experiment=guarded`, so that users can choose blocks, q and C before they ask a hospital. The
server of a real run does not use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.events import ACCOUNTANTS, poisson_round_event
from discreet.mechanisms.central_gaussian import noise_of, user_price_settings
from discreet.mechanisms.mechanism import (
    IN_THE_CLEAR,
    SERVER,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
)
from discreet.mechanisms.round_state import Released
from discreet.privacy.blocks_grid import MOVES, blocks_grid
from discreet.settings.adjacency import USER
from discreet.settings.client_settings import UNBOUND, ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.privacy import PLANNED, Sizes
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.mechanisms.round_state import RoundState
    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.randomness import RandomSource


@dataclass(frozen=True)
class GuardedBlocks:
    """Hides all records of one patient from everybody except the sites' operators."""

    run: ClientSettings = UNBOUND
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    guarantee: ClassVar[str] = USER
    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER,))
    answers: ClassVar[None] = None
    accountants: ClassVar[tuple[str, ...]] = ACCOUNTANTS
    participation: ClassVar[Participation] = IN_THE_CLEAR

    def statement(self) -> Statement:
        user = self.run.user
        if user.probability == 1:
            drawn = "every block in every round"
        else:
            drawn = f"blocks drawn with q = {user.probability:g}"
        return Statement(
            unit="all records of one patient at one site",
            adjacency="add, remove or change them; the number of blocks is public and stays",
            trusted="the operator of that site, its kernel, and that the app's blocks don't talk "
            "through that kernel: not the server",
            observer="everybody else, over all rounds",
            mechanism=f"each block of patients is a client, {drawn}; updates clipped to C, noise "
            "for 2C on the sum",
            accounting="a Poisson-sampled Gaussian a round, its noise over 2C",
            not_covered=(
                "a simulation: no code ran in a sandbox",
                "blocks that talk to each other through their shared kernel: 2Ck in place of 2C",
                "a patient at two sites, or with two ids",
            ),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        return user_price_settings(self.run)

    @property
    def sum_noise(self) -> float:
        """The standard deviation of the noise on the sum, over C: a patient moves the sum by 2C."""
        return MOVES * noise_of(self.run)

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        from discreet.privacy.grid import grid_slack

        slack = None
        if self._exact:
            slack = grid_slack
        setting = "privacy.user.clip.norm"
        return ExpectedNoise(
            self.sum_noise, clip_norm, self.run.expected_cohort, setting, slack=slack
        )

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        user = self.run.user
        if (
            self.run.evaluation.private
            or user.adaptive
            or user.sampling not in ("poisson", "everyone")
        ):
            raise ConfigError(
                "guarded blocks need privacy.user.clip.kind=fixed, and "
                "sampling.kind=poisson or everyone, without ratings"
            )
        return poisson_round_event(user.probability, noise_multiplier=noise_of(self.run))

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(noise_of(self.run))

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        from discreet.mechanisms.sums import CohortSum
        from discreet.privacy.clipping import ClippedSum

        size = state.params.numel()
        clip_norm = state.clip_norm
        grid = None
        if self._exact:
            most = self.run.user.population_size
            noise = noise_of(self.run)
            grid = blocks_grid(size, clip_norm, blocks=most, noise_multiplier=noise)
        total = CohortSum(ClippedSum(size, clip_norm, grid=grid))
        for reply in replies:
            total.take(reply)
        return total

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        """Adds noise calibrated to 2C to the sum."""
        from discreet.privacy.mechanisms import Gaussian

        noised = summed.clipped.noised(Gaussian(self.sum_noise), source.child("update"))
        return Released(noised, state.clip_norm, None, summed.replies)

    @property
    def _exact(self) -> bool:
        return self.run.noise == "grid"
