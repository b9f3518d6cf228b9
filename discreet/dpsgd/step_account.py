"""The account of a training loop's steps, in memory or in a ledger file, and its budget."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from discreet.accounting.privacy_ledger import PrivacyLedger, exceeds_budget
from discreet.dpsgd.loop_plan import LoopPlan, LoopPrivacy
from discreet.dpsgd.poisson_batches import Processes
from discreet.ledger.budget import ServerBudget
from discreet.ledger.charges import Charge, LedgerError, LedgerPosition
from discreet.ledger.owner_account import check_unit
from discreet.settings.adjacency import EXAMPLE

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.ledger.durable_ledger import DurableLedger


def spent_in(ledger: DurableLedger | None, account: str) -> PrivacyLedger:
    """The releases in a ledger file about the examples of a data set, or about its owners; none
    without a file. Raises LedgerError: the file was charged for the other unit."""
    if ledger is None:
        return PrivacyLedger()

    def spent(name: str) -> PrivacyLedger:
        return ledger.spent(EXAMPLE, data_owner=name)

    try:
        check_unit(account, spent)
    except ValueError as error:
        raise LedgerError(f"{ledger.path} {error}") from error
    return spent(account)


@dataclass
class StepAccount:
    """Charges the steps of one loop, each before its noise is used, and counts them.

    Attributes:
      events: the cost of each step of the plan, in order: events, each with the number of
        successive steps that cost it.
      ledger: a file that outlives the loop, or None. All its charges for `data_owner` count,
        including those of other loops.
      taken: the number of charged steps of this loop.
    """

    events: Sequence[tuple[DpEvent, int]]
    budget: ServerBudget
    ledger: DurableLedger | None
    data_owner: str
    taken: int = 0
    _process: int = field(default_factory=os.getpid)
    # all but the steps since `_first`
    _before: PrivacyLedger = field(default_factory=PrivacyLedger)
    _first: int = 0
    _read_at: LedgerPosition | None = None
    # the number of the plan's steps that fit the budget; None: not known yet
    _last: int | None = None

    def __post_init__(self) -> None:
        self._read()

    def _read(self) -> None:
        """Reads the file again if another process has changed it."""
        if self.ledger is None or self._read_at == (position := self.ledger.position()):
            return
        if self._read_at is not None:
            self.ledger.check_contains(self._read_at)
        self._before = spent_in(self.ledger, self.data_owner)
        self._read_at = position
        self._first = self.taken
        self._last = None

    def _steps(self, first: int, end: int) -> Iterator[tuple[DpEvent, int]]:
        start = 0
        for event, count in self.events:
            yield event, max(0, min(start + count, end) - max(start, first))
            start += count

    def _after(self, steps: int) -> PrivacyLedger:
        """All releases about this data owner's examples after `steps` steps of the loop."""
        return PrivacyLedger((*self._before.entries, *self._steps(self._first, steps)))

    def spent(self) -> PrivacyLedger:
        """All releases about this data owner's examples."""
        self._read()
        return self._after(self.taken)

    def charge(self) -> None:
        """Charges one more step. With a file, the charge is on disk when this returns. Raises
        BudgetSpent: the step would exceed the budget; LedgerError: the file can't be charged;
        RuntimeError: after a fork, where both processes would step one batch."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "step: a DPSGD takes its steps in the process that made it; in another one a batch "
                "would be stepped twice"
            )
        event = next(event for event, count in self._steps(self.taken, self.taken + 1) if count)
        charge = Charge(self.taken + 1, EXAMPLE, self.data_owner, event)
        self._require_room(charge)
        while self.ledger is not None and self._read_at is not None:
            position = self.ledger.charge([charge], since=self._read_at)
            if position is not None:
                self._read_at = position
                break
            self._read()  # another process has charged this data owner
            self._require_room(charge)
        self.taken += 1

    def _require_room(self, charge: Charge) -> None:
        # Computed once for all steps, as an epsilon takes longer than a step.
        if self._last is None:
            self._last = self._steps_within_budget()
        if self.taken >= self._last:
            self.budget.require_room(self.spent(), [charge], f"step {charge.round}")

    def _steps_within_budget(self) -> int:
        def beyond(steps: int) -> bool:
            budget = self.budget
            return exceeds_budget(
                self._after(steps),
                budget.max_epsilon,
                delta=budget.delta,
                accountant=budget.accountant,
            )

        planned = sum(count for _, count in self.events)
        possible = range(self._first, planned + 1)
        if not beyond(planned):
            return planned
        return self._first + bisect_right(possible, 0, key=beyond) - 1

    def position(self) -> dict[str, Any] | None:
        """The ledger file's identity, rows and head digest, without its path; None without a
        file."""
        if self.ledger is None:
            return None
        return asdict(self.ledger.position())

    def resume(self, taken: int, position: dict[str, Any] | None, *, is_seeded: bool) -> None:
        """Resumes after steps that an earlier process took and charged. Their charges in a file
        stay. Raises LedgerError: the file is not that of `position`, or an older copy of it, or
        only one of the two has a file; or the file was charged since, and the seed would repeat the
        noise of those steps at other parameters."""
        if position is None:
            known = None
        else:
            known = LedgerPosition(**position)
        if self.ledger is None:
            if known is not None:
                raise LedgerError(
                    "the state's steps are in a ledger file: give it as LoopPrivacy(ledger=...)"
                )
        elif known is None or not self.ledger.contains(known):
            raise LedgerError(
                f"{self.ledger.path} is not the ledger that the state's steps are in, or an older "
                "copy"
            )
        elif is_seeded and self.ledger.position() != known:
            raise LedgerError(
                f"{self.ledger.path} was charged since the state: with a seed its noise would "
                "repeat"
            )
        else:
            self._first = taken
            self._last = None
        self.taken = taken


def account_of(
    plan: LoopPlan,
    privacy: LoopPrivacy,
    processes: Processes,
    *,
    delta: float,
    target: float | None,
) -> tuple[LoopPlan, StepAccount]:
    """The plan with the noise that a target needs after earlier spending, the same in all
    processes, and its account, which the first process keeps."""
    is_first = processes.rank == 0
    n = plan.num_examples
    if is_first and privacy.ledger is not None:
        from discreet.ledger.durable_ledger import DurableLedger  # a loop without one loads less

        ledger = DurableLedger(Path(privacy.ledger))
    else:
        ledger = None
    if target is not None and is_first:
        spent = spent_in(ledger, privacy.data_owner).entries
        plan = plan.within(target, spent, delta=delta, accountant=privacy.accountant)
    plan = processes.first(lambda: plan)
    if plan.num_examples != n:
        raise ValueError(
            f"dataset: each process needs all {plan.num_examples} examples of the first one, not "
            f"{n}"
        )
    rows = processes.first(lambda: privacy.rows_per_owner)
    if rows != privacy.rows_per_owner:
        raise ValueError(
            f"rows_per_owner: each process needs that of the first one, {rows}, not "
            f"{privacy.rows_per_owner}"
        )
    if privacy.max_epsilon is None:
        most = target
    else:
        most = privacy.max_epsilon
    budget = ServerBudget(
        most if is_first else None, delta, privacy.accountant, "max_epsilon", guarantee=EXAMPLE
    )
    return plan, StepAccount(plan.events(), budget, ledger, privacy.data_owner)
