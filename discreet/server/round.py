"""One round, on one page: the cohort, the sum, the charge, the release, and the step.

Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et al. 2021 (arXiv 1905.03871),
  Algorithm 1.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from discreet.ledger.budget import ServerBudget
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerPosition
from discreet.mechanisms.mechanism import Uncharged, charged
from discreet.mechanisms.round_state import Released, RoundState
from discreet.mechanisms.sums import AnswerMechanism, Replies, UnopenedSum, UsableReply
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import Change
from discreet.planning.state import State
from discreet.privacy.quantile import LARGEST_NUMBER, LEAST_NUMBER
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TRAIN, TRAIN_AND_RATE, TrainRequest
from discreet.queries.query import Sums
from discreet.settings.adjacency import EXAMPLE, USER
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

# Ctrl-C, kill, and loss of the terminal
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Clients(Protocol):
    """The clients of a run, as a round asks them."""

    def available_clients(self) -> Sequence[int]:
        """The clients that can be asked now."""

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterable[UsableReply]:
        """The usable replies of a cohort, as they arrive."""


class RoundLedger(Protocol):
    """The ledger that rounds charge."""

    def sealed(self, replies: Iterable[UsableReply]) -> Iterator[UsableReply]:
        """The replies. An unopened sum among them can be opened only after a charge from now on."""

    def charge(self, number: int) -> None:
        """Charges round `number`. The charge is on disk when this returns."""

    def charge_answers(self, event: DpEvent | None, number: int) -> None:
        """Charges the answers that a cohort gives after round `number`. The event is None if only
        clients pay."""


def one_round(
    state: State, plan: Plan, clients: Clients, ledger: RoundLedger, source: RandomSource
) -> tuple[State, Released]:
    """The state after one round, and what it has released.

    If the cohort is empty, the round releases noise alone. A mechanism is given the source of its
    noise only after its round was charged.

    Raises:
      RoundAbandoned: too few clients are left to open a sum. If it came that far, it is charged all
      the same. Uncharged: the mechanism opens a sum before it is charged.
    """
    number = state.round + 1
    cohort = plan.sampling.draw(clients.available_clients(), source.child("cohort"), number=number)
    replies = ledger.sealed(clients.ask(request_after(state, plan), state.params, cohort))
    # Clipped again; nothing is noised or opened yet.
    summed = plan.mechanism.add_up(replies, state)
    # On disk before any noise is drawn and before a masked sum is opened.
    ledger.charge(number)
    released = plan.mechanism.release(summed, state, source.child("noise"))
    return stepped(state, plan, released), released


def request_after(state: State, plan: Plan) -> TrainRequest:
    """The request of the round after `state`."""
    number = state.round + 1
    if number in plan.run.evaluation.rating_rounds:
        work = TRAIN_AND_RATE
    else:
        work = TRAIN
    return TrainRequest(number, state.clip_norm, plan.run, work=work)


def stepped(state: State, plan: Plan, released: Released) -> State:
    """The state after a step with a round's release: post-processing.

    Raises:
      ConfigError: the mechanism, which may be one of the user's own, has moved the clip norm out of
        the range that clients accept.
    """
    clip_norm = float(released.clip_norm)  # a mechanism of one's own may give any number
    if not (LEAST_NUMBER <= clip_norm <= LARGEST_NUMBER or clip_norm == math.inf):
        name = type(plan.mechanism).__name__
        raise ConfigError(
            f"the clip_norm after a round must be within [{LEAST_NUMBER:g}, {LARGEST_NUMBER:g}]: "
            f"{name} gives {clip_norm}"
        )
    mean = (released.total / plan.denominator).to(state.params.dtype)
    noise = plan.mechanism.expected_noise(state.clip_norm)
    energy = 0.0
    if noise.multiplier:
        stddev = noise.multiplier * noise.norm / plan.denominator
        energy = state.params.numel() * stddev**2
    after = plan.optimizer.step(state, Change(mean, energy))
    return replace(after, clip_norm=clip_norm)


def one_query(
    state: RoundState,
    answers: AnswerMechanism,
    replies: Replies,
    ledger: RoundLedger,
    source: RandomSource,
) -> Sums:
    """The noised sum of the answers of a cohort that is asked for nothing else, after the round of
    `state`.

    Raises:
      RoundAbandoned: as `one_round`.
    """
    summed = answers.add_up(ledger.sealed(replies), state)
    ledger.charge_answers(answers.event, state.round)
    return answers.release(summed, state, source)


@dataclass
class RunLedger:
    """The ledger of a run, as its rounds charge it.

    Attributes:
      ledger: on disk.
      budgets: the run's, by guarantee.
      guarantee: the one that rounds are charged to.
      events: the cost of each round that is still to come, by its number; None if only clients pay.
      at_charge: called before each charge, also where only clients pay.
      position: that of the ledger after the last charge of this process; None before the first.
    """

    ledger: DurableLedger
    budgets: Mapping[str, ServerBudget] = field(default_factory=dict)
    guarantee: str = USER
    events: Mapping[int, DpEvent | None] = field(default_factory=dict)
    at_charge: Callable[[], None] = lambda: None
    position: LedgerPosition | None = None

    @classmethod
    def of(cls, ledger: DurableLedger, plan: Plan, state: State) -> RunLedger:
        """The ledger of the rounds of a plan after `state`. The mechanism says what they cost here,
        once. Uncharged: it has no cost for one of them."""
        mechanism = plan.mechanism
        # A round that is on the ledger already may have been released with other noise.
        before = ledger.last_round(USER)
        events = {
            number: charged(mechanism, number, again=number <= before)
            for number in range(state.round + 1, plan.run.rounds + 1)
        }
        budgets = {name: plan.budget(name) for name in (USER, EXAMPLE)}
        return cls(ledger, budgets, mechanism.guarantee, events)

    def require_room(self, guarantee: str, event: DpEvent | None, what: str) -> None:
        """Raises BudgetSpent if a release at this cost, for `what`, would exceed the budget: that
        of all runs over the population if the ledger charges an account, else that of the run."""
        if event is None:
            return
        charge = Charge(0, guarantee, "", event)
        budget = self.budgets[guarantee]
        if self.ledger.account is not None:
            self.ledger.account.require_room([charge], what)
        elif budget.max_epsilon is not None:
            budget.require_room(self.ledger.spent(guarantee), [charge], what)

    def sealed(self, replies: Iterable[UsableReply]) -> Iterator[UsableReply]:
        """See `RoundLedger`."""
        return map(partial(self._seal, since=self.position), replies)

    def _seal(self, reply: UsableReply, *, since: LedgerPosition | None) -> UsableReply:
        if isinstance(reply, UnopenedSum):
            return replace(reply, open=partial(self._open, reply, since))
        return reply

    def _open(self, summed: UnopenedSum, since: LedgerPosition | None) -> Tensor:
        if self.position == since:
            raise Uncharged("a masked sum was to be opened before it was charged")
        return summed.open()

    def charge(self, number: int) -> None:
        """See `RoundLedger`."""
        self.at_charge()
        event = self.events[number]
        if event is not None:
            self.position = self.ledger.charge([Charge(number, self.guarantee, "", event)])

    def charge_answers(self, event: DpEvent | None, number: int) -> None:
        """See `RoundLedger`. The charge is at user level, which pays for answers."""
        self.at_charge()
        if event is not None:
            self.position = self.ledger.charge([Charge(number, USER, "", event)])


class EndsLater:
    """A context in which signals that ask this process to end wait, from `begin` to the end of the
    block. Elsewhere than in the main thread, where Python runs no handlers, it does nothing."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}  # the handlers, by signal
        self._asked: list[int] = []

    def __enter__(self) -> None:
        pass

    def begin(self) -> None:
        """From now on they wait. A second call in a block changes nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: it is none of Python's
                self._before[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self._asked.append(number)

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        asked, self._asked = self._asked, []
        for number in asked[:1]:
            signal.raise_signal(number)
