"""What guarded sites release, simulated: each client is a block of patients, and one patient moves the sum by 2C.

The mechanism of `discreet.guard.block_release`, with one noise that all sites share, as `experiment=guarded` has it, so
that people choose blocks, q and C before they ask a hospital. The server of a real run has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.events import ACCOUNTANTS, poisson_round_event
from discreet.mechanisms.central_gaussian import noise_of
from discreet.mechanisms.mechanism import IN_THE_CLEAR, SERVER, ClientRound, ExpectedNoise, Participation, Statement
from discreet.mechanisms.round_state import Released, RoundState
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import USER, ClipConfig, Sizes
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.grid import Grid
    from discreet.privacy.randomness import RandomSource

MOVES = 2  # clip norms by which one patient moves the sum: its block changes, and stays


@dataclass(frozen=True)
class GuardedBlocks:
    """All records of one patient, from everybody but the sites' operators.

    Attributes:
      run, clip, sizes: as those of every mechanism.
    """

    run: ClientSettings
    clip: ClipConfig
    sizes: Sizes
    guarantee: ClassVar[str] = USER
    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER,))
    answers: ClassVar[None] = None
    accountants: ClassVar[tuple[str, ...]] = ACCOUNTANTS
    participation: ClassVar[Participation] = IN_THE_CLEAR

    def __post_init__(self) -> None:
        user = self.run.user
        rates = self.run.evaluation.private
        if rates or user.adaptive or user.sampling not in ("poisson", "everyone"):
            raise ConfigError(
                "guarded blocks have privacy.user.clip.kind=fixed, sampling.kind=poisson or everyone, and rate nothing"
            )

    def statement(self) -> Statement:
        user = self.run.user
        drawn = "every block in every round" if user.probability == 1 else f"blocks drawn with q = {user.probability:g}"
        return Statement(
            unit="all records of one patient at one site",
            adjacency="add, remove or change them; the number of blocks is public and stays",
            trusted="the operator of that site, and its kernel: not the app, not the server",
            observer="everybody else, over all rounds",
            mechanism=f"each block of patients is a client, {drawn}; updates clipped to C, noise for 2C on the sum",
            accounting="a Poisson-sampled Gaussian a round, its noise over 2C",
            not_covered=(
                "a simulation: nothing was held in a sandbox",
                "channels between blocks through the machine",
                "a patient at two sites, or with two ids",
            ),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        return {
            "privacy.user.noise_multiplier": self.run.user.noise_multiplier,
            "privacy.user.clip.kind": "fixed",
        }

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        from discreet.privacy.grid import grid_slack

        slack = grid_slack if self._exact else None
        noise = MOVES * noise_of(self.run)
        return ExpectedNoise(noise, clip_norm, self.run.expected_cohort, "privacy.user.clip.norm", slack=slack)

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        return poisson_round_event(self.run.user.probability, noise_multiplier=noise_of(self.run))

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(noise_of(self.run))

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        """Clips once more, and adds up."""
        from discreet.mechanisms.sums import CohortSum, in_the_clear

        total = CohortSum(state.params.numel(), state.clip_norm, self._grid(state))
        for reply in replies:
            total.take(in_the_clear(reply))
        return total

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        """Noises the sum for 2C."""
        from discreet.privacy.mechanisms import Gaussian

        noised = summed.clipped.noised(Gaussian(MOVES * noise_of(self.run)), source.child("update"))
        return Released(noised, state.clip_norm, None, summed.replies)

    @property
    def _exact(self) -> bool:
        return self.run.noise == "grid"

    def _grid(self, state: RoundState) -> Grid | None:
        from discreet.privacy.grid import grid_for

        if not self._exact:
            return None
        scale, most = MOVES * noise_of(self.run) * state.clip_norm, self.run.user.population_size
        return grid_for(state.clip_norm, state.params.numel(), largest_cohort=most, noise_scale=scale)
