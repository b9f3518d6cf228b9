"""Rounds by the page of the server, `discreet.server.round.one_round`, with replies that are there
already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from dp_accounting import DpEvent
from torch import Tensor

from discreet.ledger.charges import LedgerPosition
from discreet.mechanisms.mechanism import Mechanism, charged
from discreet.mechanisms.round_state import Released, RoundStart
from discreet.mechanisms.sums import AnswerMechanism, UsableReply
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerOptimizer, ServerSGD
from discreet.planning.state import State
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TrainRequest
from discreet.queries.query import Sums
from discreet.server.round import RunLedger, one_query, one_round
from discreet.settings.client_settings import ClientSettings

Charge = Callable[[DpEvent], object]


def free(event: DpEvent) -> None:
    """A charge that is written nowhere."""


class Everybody:
    """Draws nobody: the replies are there already, and no randomness is used for them."""

    def draw(self, members: Sequence[int], source: object, *, number: int) -> list[int]:
        return []


@dataclass
class Answered:
    """Clients whose replies are there already."""

    replies: Iterable[UsableReply]

    def available_clients(self) -> Sequence[int]:
        return ()

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterable[UsableReply]:
        return self.replies


class OnlyCharges:
    """What `RunLedger` needs of a ledger on disk."""

    def __init__(self, charge: Charge) -> None:
        self.to = charge
        self.rows = 0

    def charge(self, charges: Sequence[Any]) -> LedgerPosition:
        for each in charges:
            self.to(each.event)
        self.rows += len(charges)
        return LedgerPosition("", self.rows, "")


class Unsplit:
    """A source that gives its cohort none, and its noise itself: a test's source is that of the
    noise."""

    def __init__(self, source: RandomSource) -> None:
        self.source = source

    def child(self, name: str) -> RandomSource | None:
        return self.source if name == "noise" else None


@dataclass(frozen=True)
class RoundPlan:
    """What a round needs of a plan."""

    mechanism: Mechanism
    optimizer: ServerOptimizer
    sampling: Everybody = field(default_factory=Everybody)

    @property
    def run(self) -> ClientSettings:
        return cast(Any, self.mechanism).run

    @property
    def denominator(self) -> float:
        return self.run.expected_cohort


def round_of(
    mechanism: Mechanism,
    state: State,
    replies: Iterable[UsableReply],
    source: RandomSource,
    *,
    optimizer: ServerOptimizer = ServerSGD(),  # noqa: B008
    charge: Charge = free,
    before: int = 0,
) -> tuple[State, Released]:
    """The state after a round of these replies, and what it releases; `source`: of the noise."""
    plan = cast(Plan, RoundPlan(mechanism, optimizer))
    number = state.round + 1
    events = {number: charged(mechanism, number, again=number <= before)}
    ledger = RunLedger(cast(Any, OnlyCharges(charge)), {}, mechanism.guarantee, events)
    return one_round(state, plan, Answered(replies), ledger, cast(RandomSource, Unsplit(source)))


def query_of(
    answers: AnswerMechanism,
    replies: Iterable[UsableReply],
    source: RandomSource,
    charge: Charge = free,
) -> Sums:
    """The noised sum of the answers of a cohort that is asked for nothing else."""
    ledger = RunLedger(cast(Any, OnlyCharges(charge)))
    return one_query(RoundStart(0, torch.zeros(0), 1.0), answers, replies, ledger, source)
