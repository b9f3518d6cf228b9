"""The privacy of a training loop: its noise, its budget, and the account of its steps in memory or in a ledger file."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from discreet.accounting.calibration import check_whole
from discreet.accounting.events import ACCOUNTANTS, PLD
from discreet.accounting.privacy_ledger import PrivacyLedger, passes
from discreet.ledger.budget import ServerBudget
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerPosition
from discreet.privacy.mechanisms import Gaussian
from discreet.settings.privacy import EXAMPLE

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class LoopPrivacy:
    """The choices for noise, budget and account that few loops need: `DPSGD(..., privacy=LoopPrivacy(...))`.

    Attributes:
      noise_multiplier: the noise's standard deviation over the clip norm, at least 0; 0 protects nobody. Give this or
        `target_epsilon`.
      max_epsilon: the budget; a step that would pass it raises BudgetSpent. None: `target_epsilon`, if that is given.
      accountant: "pld" or "rdp".
      ledger: a ledger file, made before by `discreet ledger create FILE`, in which runs add up and which outlives them.
        None: the account is in memory.
      data_owner: whose data these are, if a ledger file knows of several data sets.
      public_num_examples: a constant that takes the place of n in the sampling and the account, which makes the
        guarantee add-or-remove; at least batch_size, and chosen without looking at the data.
      seed: makes batches, dropout and noise reproducible; they then protect nobody. None: secure randomness.

    Raises:
      ValueError: one is out of range; the message names it.
    """

    noise_multiplier: float | None = None
    max_epsilon: float | None = None
    accountant: str = PLD
    ledger: str | Path | None = None
    data_owner: str = ""
    public_num_examples: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        Gaussian(self.noise_multiplier or 0.0)  # checks the noise multiplier
        if self.max_epsilon is not None and not self.max_epsilon > 0:
            raise ValueError(f"max_epsilon must be above 0, not {self.max_epsilon}")
        if self.accountant not in ACCOUNTANTS:
            raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {self.accountant!r}")
        if self.public_num_examples is not None:
            check_whole("public_num_examples", self.public_num_examples)


def spent_in(ledger: DurableLedger | None, data_owner: str) -> PrivacyLedger:
    """The releases about a data owner's examples that a ledger file knows of; none without a file."""
    return PrivacyLedger() if ledger is None else ledger.spent(EXAMPLE, data_owner=data_owner)


@dataclass
class StepAccount:
    """Charges equal steps of one loop, each before its noise is used, and counts them.

    Attributes:
      event: the cost of one step.
      planned: the most steps that the loop takes.
      ledger: a file that outlives the loop, or None. All that it says of `data_owner` counts, from whatever loop.
      taken: the steps of this loop that were charged.
    """

    event: DpEvent
    planned: int
    budget: ServerBudget
    ledger: DurableLedger | None
    data_owner: str
    taken: int = 0
    _before: PrivacyLedger = field(default_factory=PrivacyLedger)  # all but the steps since `_first`
    _first: int = 0
    _read_at: LedgerPosition | None = None
    _room: int | None = None  # steps since `_first` that the budget has room for; None: not known yet

    def __post_init__(self) -> None:
        self._read()

    def _read(self) -> None:
        """Reads the file if another process has changed it."""
        if self.ledger is None or self._read_at == (position := self.ledger.position()):
            return
        self._before = spent_in(self.ledger, self.data_owner)
        self._read_at, self._first, self._room = position, self.taken, None

    def spent(self) -> PrivacyLedger:
        """All releases about this data owner's examples."""
        self._read()
        return self._before.record(self.event, self.taken - self._first)

    def charge(self) -> None:
        """Charges one more step. With a file, it is on disk when this returns.

        Raises:
          BudgetSpent: the step would pass the budget.
          LedgerError: the file can't be charged.
        """
        charge = Charge(self.taken + 1, EXAMPLE, self.data_owner, self.event)
        self._require_room(charge)
        while self.ledger is not None and self._read_at is not None:
            position = self.ledger.charge_after(self._read_at, [charge])
            if position is not None:
                self._read_at = position
                break
            self._read()  # another process has charged this data owner
            self._require_room(charge)
        self.taken += 1

    def _require_room(self, charge: Charge) -> None:
        if self._room is None:  # looked at once for all steps: an epsilon takes longer than a step
            self._room = self._steps_within_budget()
        if self.taken - self._first >= self._room:
            self.budget.require_room(self.spent(), [charge], f"step {charge.round}")

    def _steps_within_budget(self) -> int:
        most, left = self.budget.max_epsilon, self.planned - self._first

        def beyond(steps: int) -> bool:
            spent = self._before.record(self.event, steps)
            return passes(spent, most, delta=self.budget.delta, accountant=self.budget.accountant)

        return left if not beyond(left) else bisect_right(range(left + 1), 0, key=beyond) - 1
