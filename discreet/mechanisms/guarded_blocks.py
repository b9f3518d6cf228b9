"""What guarded sites release, simulated: each client is a block of patients, and one patient moves the sum by 2C.

The mechanism of `discreet.guard.block_release`, with one noise that all sites share, as `experiment=guarded` has it, so
that people choose blocks, q and C before they ask a hospital. The server of a real run has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.events import poisson_round_event
from discreet.mechanisms.mechanism import Released, Round, ServerMechanism, Statement
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.mechanisms.sums import CohortSum, Replies

MOVES = 2  # clip norms by which one patient moves the sum: its block changes, and stays


@dataclass(frozen=True)
class GuardedBlocks(ServerMechanism):
    """All records of one patient, from everybody but the sites' operators."""

    guarantee: ClassVar[str] = USER
    deciding: ClassVar[tuple[str, ...]] = ("privacy.user.noise_multiplier", "privacy.user.clip.kind")
    fixed_norm: ClassVar[str] = "privacy.user.clip.norm"

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
    def exact(self) -> bool:
        return self.run.noise == "grid"

    @property
    def sum_noise(self) -> float:
        return MOVES * self.noise_multiplier

    def event(self, noise_multiplier: float, *, trains: bool = True, rates: bool = False) -> DpEvent:
        user = self.run.user
        if rates or user.adaptive or user.sampling not in ("poisson", "everyone"):
            raise ConfigError(
                "guarded blocks have privacy.user.clip.kind=fixed, sampling.kind=poisson or everyone, and rate nothing"
            )
        return poisson_round_event(user.probability, noise_multiplier=noise_multiplier)

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        from discreet.mechanisms.sums import CohortSum
        from discreet.privacy.grid import grid_for

        scale, most = self.sum_noise * clip_norm, self.run.user.population_size
        grid = grid_for(clip_norm, num_params, largest_cohort=most, noise_scale=scale) if self.exact else None
        return CohortSum(num_params, clip_norm, grid)

    def release(self, replies: Replies, at: Round) -> Released:
        """Clips once more, adds up, and noises the sum for 2C."""
        from discreet.mechanisms.sums import take_all
        from discreet.privacy.mechanisms import Gaussian

        total = self.empty(at.num_params, at.clip_norm)
        take_all(replies, total, None)
        at.charge(self.event(self.noise_multiplier))
        noised = total.clipped.noised(Gaussian(self.sum_noise), at.source.child("update"))
        return Released(noised, at.clip_norm, None, total.replies)
