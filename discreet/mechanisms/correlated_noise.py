"""DP-FedAvg without secret sampling: clients take turns, and the server's noise is correlated over rounds.

Each round's noise takes back a part of what earlier rounds added (matrix factorisation, DP-FTRL): the running sum of
updates, which the model is, holds less of it. Matrices, sensitivity and account: `discreet.accounting.correlation`.
Source: Kalinin and Lampert 2024 (arXiv 2405.13763); Kalinin, McKenna, Upadhyay and Lampert 2025 (arXiv 2505.12128).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.correlation import NONE, SQRT, Turns
from discreet.accounting.events import poisson_round_event
from discreet.ledger.rollback_guard import LedgerError
from discreet.mechanisms.central_gaussian import ASKED_BEFORE, OF_ANOTHER_APP, REPORTED, protected
from discreet.mechanisms.mechanism import Released, Round, ServerMechanism, Statement
from discreet.settings.privacy import USER
from discreet.settings.training import FLOWER_APP

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.randomness import RandomSource

BLOCK = 8  # rounds whose share of all earlier noise is drawn at once, and held: so many vectors of float64
SPREAD = 4.0  # the grid is for so much more noise than a round's own: the weights of all kinds add up to less in size


@dataclass(frozen=True)
class CorrelatedNoise(ServerMechanism):
    """All data of one client, from whoever sees the released models and who is asked; the server is trusted."""

    exact: ClassVar[bool] = True
    guarantee: ClassVar[str] = USER
    deciding: ClassVar[tuple[str, ...]] = (
        *("privacy.user.noise_multiplier", "privacy.user.clip.kind", "privacy.user.clip.norm"),
        *("sampling.groups", "privacy.user.correlation.kind"),
    )

    def statement(self) -> Statement:
        groups, foreign = self.turns.groups, self.run.model.name == FLOWER_APP
        turns = f"{groups} public groups in turn, one a round" if groups > 1 else "everybody in every round"
        asked, (unit, who) = ASKED_BEFORE if self.run.data.normalise == "private" else "", protected(self.run)
        return Statement(
            unit=unit,
            adjacency=f"add or remove one {who}; to whoever sees who takes part: its updates count as zero",
            trusted="the server, which keeps the keys of earlier noise until the run is over",
            observer="who sees every released model, and who takes part in which round",
            mechanism=f"DP-FedAvg with fixed clip norm, {turns}, Gaussian noise on the sum at the server {self._words}",
            accounting="one Gaussian for all rounds, of the noise over their sensitivity, not amplified; each round is "
            f"charged as what it adds to those before it{asked}",
            not_covered=OF_ANOTHER_APP if foreign else REPORTED,
        )

    @property
    def decided(self) -> Mapping[str, object]:
        return {"privacy.user.correlation.bandwidth": self.turns.bandwidth}

    def grid_slack(self, values: int, scale: float) -> float | None:
        """Each round's noise has at most one term of each round, of a weight of at most 1 in size: replace one key's
        Gaussians after the other, each moves as for a single one."""
        from discreet.privacy.grid import grid_slack

        return min(1.0, self.run.rounds * grid_slack(values, scale))

    @property
    def turns(self) -> Turns:
        user, rounds = self.run.user, self.run.rounds
        width = user.correlation.width(groups=user.groups, rounds=rounds)
        return Turns(user.correlation.kind, width, user.groups, rounds)

    def event(self, noise_multiplier: float, *, trains: bool = True, rates: bool = False) -> DpEvent:
        """Of the dearest round by itself."""
        return _gaussian(noise_multiplier, self.turns.largest_move(self.run.rounds))

    def event_of(self, number: int, *, rates: bool = False, again: bool = False) -> DpEvent:
        """Of what the round adds to those before it; nothing in rounds that no client of the first group moves."""
        turns = self._turns_of(number)
        moved = turns.largest_move(number) if again else float(turns.moves()[number - 1])
        return _gaussian(self.noise_multiplier, moved)

    def first_rounds(self, noise_multiplier: float, count: int) -> tuple[tuple[DpEvent, int], ...]:
        """One Gaussian, for all of them."""
        turns = replace(self.turns, rounds=max(1, count))
        return ((_gaussian(noise_multiplier, turns.sensitivity), 1),) if count else ()

    @property
    def sum_noise(self) -> float:
        return self.noise_multiplier * self.turns.late_noise

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        from discreet.mechanisms.sums import CohortSum
        from discreet.privacy.grid import grid_for

        scale = SPREAD * self.noise_multiplier * clip_norm
        grid = grid_for(clip_norm, num_params, largest_cohort=self.run.user.population_size, noise_scale=scale)
        return CohortSum(num_params, clip_norm, grid)

    def release(self, replies: Replies, at: Round) -> Released:
        """It clips once more, adds up, and adds new noise and noise of earlier rounds, drawn again.

        Guarantee: for neighbouring runs that differ in one client, which is asked at most every `groups` rounds, the
        rounds so far are together one Gaussian mechanism, as `discreet.accounting.correlation` says, if each round's
        noise is made once. So a round is on disk, with the keys of the noise, before it is out: one that a crash cuts
        off is released again as it was, to the last bit, and nobody is asked for it again. If it was charged and is not
        on disk, it is charged again, as a release of its own: old files that were put back look the same. Noise does
        not depend on who replies.

        Raises:
          LedgerError: the keys of earlier noise are not those of the rounds before.
        """
        import torch

        from discreet.mechanisms.sums import take_all
        from discreet.privacy.sampling import in_turn

        kept, number = at.kept.load(), at.number + 1
        done = int(kept["round"]) if kept else 0
        if done == number:
            return Released(kept["total"], at.clip_norm, None, int(kept["replies"]))
        if done != at.number:
            raise LedgerError(
                f"the keys of the noise are those after round {done}, and the run goes on after round {at.number}: a "
                "run that is over does not go on, and one whose keys are lost must begin anew"
            )
        total = self.empty(at.num_params, at.clip_norm)
        # Parts, without a client's number, were made by this process.
        clients, groups = ((reply, getattr(reply, "client", -1)) for reply in replies), self.turns.groups
        theirs = (reply for reply, client in clients if client < 0 or in_turn(client, number, groups=groups))
        take_all(theirs, total, at.answers)
        at.charge(self.event_of(number, again=at.again))
        keys = self._keys(at.source, kept.get("keys"))
        noised = self._noised(total, keys, number)
        # On disk before it is out, with the key of its noise: this round has no other release.
        counts = {"round": torch.tensor(number), "replies": torch.tensor(total.replies)}
        at.kept.save({"total": noised, "keys": keys, **counts})
        return Released(noised, at.clip_norm, None, total.replies)

    def _keys(self, source: RandomSource, before: Tensor | None) -> Tensor:
        """The keys of this round's noise and of all earlier noise that this or a later round has a part of, uint8
        (n, 32)."""
        import torch

        new = torch.frombuffer(bytearray(source.child("update").words(4).tobytes()), dtype=torch.uint8).unsqueeze(0)
        keys = new if before is None else torch.cat([before, new])
        used = self.turns.weights.nonzero()[0].max() + 1
        return keys[-used:]

    def _noised(self, total: CohortSum, keys: Tensor, number: int) -> Tensor:
        import torch

        from discreet.privacy.correlated_gaussian import Block, CorrelatedGaussian

        assert total.grid is not None
        # The newest key is the last one, and its weight the first.
        weights, grid = self._turns_of(len(keys) + BLOCK).weights.tolist(), total.grid
        parts = tuple(zip(weights, map(bytes, reversed(keys.tolist())), strict=False))
        at, block = (len(keys) - 1) % BLOCK, None
        if number == len(keys) > BLOCK:
            old = range(len(keys) - at - 1)  # the keys of finished blocks, of which none was removed yet
            block = Block(at, tuple(tuple(weights[row + 1 + each] for each in old) for row in range(BLOCK)))
        add = CorrelatedGaussian(self.noise_multiplier).add_grid_noise
        noised = add(total.clipped.values, total.clip_norm, grid=grid, parts=parts, block=block)
        return grid.to_float(noised, torch.float64)

    def _turns_of(self, rounds: int) -> Turns:
        """Of so many rounds, or of those that are planned if these are more."""
        return replace(self.turns, rounds=max(rounds, self.turns.rounds))

    @property
    def _words(self) -> str:
        kind, band = self.turns.kind, self.turns.bandwidth
        said = {NONE: "independent in each round", SQRT: "correlated over all rounds (square root)"}
        return said.get(kind, f"correlated over rounds ({kind.upper()}, bandwidth {band})")


def _gaussian(noise_multiplier: float, moved: float) -> DpEvent:
    """The event of Gaussian noise on a sum that moves by so many clip norms."""
    return poisson_round_event(1.0 if moved else 0.0, noise_multiplier=noise_multiplier / (moved or 1.0))
