"""DP-FedAvg without secret sampling: clients take turns, and the server's noise is correlated over
rounds.

Each round's noise cancels part of the noise of earlier rounds (matrix factorisation, DP-FTRL), so
the running sum of updates, which is the model, has less noise. Matrices, sensitivity and account:
`discreet.accounting.correlation`. Source: Kalinin and Lampert 2024 (arXiv 2405.13763); Kalinin,
McKenna, Upadhyay and Lampert 2025 (arXiv 2505.12128).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.correlation import Turns, best_bandwidth
from discreet.accounting.events import ACCOUNTANTS, BSR, NONE, SQRT, poisson_round_event
from discreet.ledger.charges import LedgerError
from discreet.mechanisms.central_gaussian import (
    ASKED_BEFORE,
    OF_ANOTHER_APP,
    REPORTED,
    UserNoise,
    noise_of,
    protected,
    user_price_settings,
)
from discreet.mechanisms.mechanism import (
    SERVER,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
)
from discreet.mechanisms.round_state import Released
from discreet.settings.training import FLOWER_APP

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from discreet.mechanisms.round_state import RoundState
    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.randomness import RandomSource

# rounds whose share of all earlier noise is drawn and held at once, each a vector of float64
BLOCK = 8
# the grid allows for this much more noise than a round's own: the weights of all kinds add up to
# less in absolute value
SPREAD = 4.0

KEYS = "copies of the keys of earlier noise (secrets.safetensors)"


@dataclass(frozen=True)
class CorrelatedNoise(UserNoise):
    """Hides all data of one client from observers of the released models, even if they see which
    clients are asked; the server is trusted.

    Guarantee: for neighbouring runs that differ in one client, which is asked at most every
    `groups` rounds, the rounds so far are together one Gaussian mechanism, as
    `discreet.accounting.correlation` says, if each round's noise is made once. So each round is on
    disk, with the keys of its noise, before it is released. A round that a crash interrupts is
    released again, equal to the last bit, and no client is asked again. If it was charged but is
    not on disk, it is charged again as a separate release, because restored old files look the
    same. The noise does not depend on which clients reply.

    `DPFedAvg` needs sampling="cyclic" for it, or "everyone", with which it gains nothing.

    Further attributes are as `CentralGaussian` has them.

    Attributes:
      clipping: `FixedClipping`.
      groups: the number of groups that take turns. A node's number decides its group, and it is
        asked at most once in this many rounds.
      correlation: "bsr", "bisr", "sqrt" or "none" (independent noise).
      bandwidth: of bsr and bisr; None for that of the least noise on the running sum.
    """

    _: KW_ONLY
    groups: int | None = None
    correlation: str = BSR
    bandwidth: int | None = None
    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER,))

    def statement(self) -> Statement:
        groups = self.turns.groups
        foreign = self.run.model.name == FLOWER_APP
        if groups > 1:
            turns = f"{groups} public groups in turn, one a round"
        else:
            turns = "everybody in every round"
        if self.run.data.normalise == "private":
            asked = ASKED_BEFORE
        else:
            asked = ""
        unit, who = protected(self.run)
        return Statement(
            unit=unit,
            adjacency=f"add or remove one {who}; against an observer who sees which clients take "
            "part: its updates count as zero",
            trusted="the server, which keeps the keys of earlier noise until the run is over",
            observer=(
                "an observer of every released model who also sees which clients take part "
                "in which round"
            ),
            mechanism=f"DP-FedAvg with fixed clip norm, {turns}, Gaussian noise on the sum at the "
            f"server {self._words}",
            accounting="one Gaussian for all rounds, with the multiplier of the noise over their "
            "sensitivity, not amplified; each round is charged for the cost that it adds to the "
            f"rounds before it{asked}",
            not_covered=(KEYS, *(OF_ANOTHER_APP if foreign else REPORTED)),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        user = self.run.user
        return user_price_settings(self.run) | {
            "privacy.user.clip.norm": self.clip.norm,
            "sampling.groups": user.groups if user.sampling == "cyclic" else None,
            "privacy.user.correlation.kind": user.correlation.kind,
            "privacy.user.correlation.bandwidth": self.turns.bandwidth,
        }

    @property
    def accountants(self) -> tuple[str, ...]:
        return ACCOUNTANTS

    @property
    def participation(self) -> Participation:
        return Participation(turns=self.turns)

    @property
    def turns(self) -> Turns:
        """The turns of the clients."""
        user = self.run.user
        rounds = self.run.rounds
        width = user.correlation.bandwidth
        if width is None:  # the one with the least error
            width = best_bandwidth(user.correlation.kind, groups=user.groups, rounds=rounds)
        return Turns(user.correlation.kind, width, user.groups, rounds)

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        noise = noise_of(self.run) * self.turns.late_noise
        return ExpectedNoise(noise, clip_norm, self.run.expected_cohort, slack=self._slack)

    def _slack(self, values: int, scale: float) -> float:
        """The slack of rounded noise. Each round's noise has at most one term for each round, with
        a weight of at most 1 in absolute value. Replacing the Gaussians of one key at a time
        changes each by as much as for a single one."""
        from discreet.privacy.grid import grid_slack

        return min(1.0, self.run.rounds * grid_slack(values, scale))

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        """The event of the cost that this round adds to those before it; nothing in rounds whose
        release no client of the first group changes."""
        turns = self._turns_of(number)
        if again:
            moved = turns.largest_move(number)
        else:
            moved = _moves(turns)[number - 1]
        return _gaussian(noise_of(self.run), moved)

    @property
    def answers(self) -> None:
        """None: a rating would ask clients out of turn."""

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(self.run.user.noise_multiplier or 0.0)

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        """The sum over the clients whose turn it is. A reply out of turn counts as zero."""
        from discreet.mechanisms.sums import CohortSum
        from discreet.privacy.clipping import ClippedSum
        from discreet.privacy.grid import grid_for
        from discreet.privacy.sampling import in_turn

        size = state.params.numel()
        clip_norm = state.clip_norm
        number = state.round + 1
        scale = SPREAD * noise_of(self.run) * clip_norm
        grid = grid_for(
            clip_norm, size, largest_cohort=self.run.user.population_size, noise_scale=scale
        )
        total = CohortSum(ClippedSum(size, clip_norm, grid=grid))
        for reply in replies:
            # Partial sums, without client numbers, were made by this process.
            client = getattr(reply, "client", -1)
            if client < 0 or in_turn(client, number, groups=self.turns.groups):
                total.take(reply)
        return total

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        """Adds new noise, and earlier rounds' noise, redrawn from its keys. The release is on disk
        before it leaves.

        Raises:
          LedgerError: the keys of earlier noise are not those of the rounds before.
        """
        import torch

        kept = _earlier(state)
        number = state.round + 1
        keys = self._keys(source, kept.get("keys"))
        noised = self._noised(summed, keys, number)
        # On disk before it is released, with the key of its noise: this round has no other release.
        counts = {"round": torch.tensor(number), "replies": torch.tensor(summed.replies)}
        state.carried.save({"total": noised, "keys": keys, **counts})
        return Released(noised, state.clip_norm, None, summed.replies)

    def _keys(self, source: RandomSource, before: Tensor | None) -> Tensor:
        """The keys of this round's noise, and of all earlier noise that this or a later round uses,
        uint8 (n, 32)."""
        import torch

        new = torch.frombuffer(
            bytearray(source.child("update").words(4).tobytes()), dtype=torch.uint8
        ).unsqueeze(0)
        if before is None:
            keys = new
        else:
            keys = torch.cat([before, new])
        used = self.turns.weights.nonzero()[0].max() + 1
        return keys[-used:]

    def _noised(self, total: CohortSum, keys: Tensor, number: int) -> Tensor:
        import torch

        from discreet.privacy.correlated_gaussian import CorrelatedGaussian, RoundBlock

        grid = total.clipped.grid
        assert grid is not None
        # The newest key comes last, but its weight comes first.
        weights = self._turns_of(len(keys) + BLOCK).weights.tolist()
        parts = tuple(zip(weights, map(bytes, reversed(keys.tolist())), strict=False))
        at = (len(keys) - 1) % BLOCK
        block = None
        if number == len(keys) > BLOCK:
            # the keys of finished blocks, none of which has been removed yet
            old = range(len(keys) - at - 1)
            block = RoundBlock(
                at, tuple(tuple(weights[row + 1 + each] for each in old) for row in range(BLOCK))
            )
        add = CorrelatedGaussian(noise_of(self.run)).add_grid_noise
        norm = total.clipped.clip_norm
        noised = add(total.clipped.values, norm, grid=grid, parts=parts, block=block)
        return grid.to_float(noised, torch.float64)

    def _turns_of(self, rounds: int) -> Turns:
        """The turns of so many rounds, or of the planned rounds if these are more."""
        return replace(self.turns, rounds=max(rounds, self.turns.rounds))

    @property
    def _words(self) -> str:
        kind = self.turns.kind
        band = self.turns.bandwidth
        said = {NONE: "independent in each round", SQRT: "correlated over all rounds (square root)"}
        return said.get(kind, f"correlated over rounds ({kind.upper()}, bandwidth {band})")


def _earlier(state: RoundState) -> Mapping[str, Tensor]:
    """The carried state of earlier rounds. LedgerError: it is not that of the round before."""
    kept = state.carried.load()
    if kept:
        done = int(kept["round"])
    else:
        done = 0
    if done != state.round:
        raise LedgerError(
            "a finished run with correlated noise can't be resumed, nor one whose noise keys are "
            f"lost: start a new one (the keys are those after round {done}, the run is at round "
            f"{state.round})"
        )
    return kept


@lru_cache(maxsize=16)
def _moves(turns: Turns) -> tuple[float, ...]:
    return tuple(turns.moves().tolist())


def _gaussian(noise_multiplier: float, moved: float) -> DpEvent:
    """The event of Gaussian noise on a sum with a sensitivity of so many clip norms."""
    return poisson_round_event(
        1.0 if moved else 0.0, noise_multiplier=noise_multiplier / (moved or 1.0)
    )
