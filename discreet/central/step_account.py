"""What the steps of a training loop have spent, in memory or in a ledger file, and the budget that ends them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from discreet.central.loop_settings import LoopSettings
from discreet.client_settings import EXAMPLE
from discreet.federated.durable_ledger import Charge, DurableLedger, Mark
from discreet.privacy.calibration import noise_multiplier_for_epsilon
from discreet.privacy.events import ACCOUNTANTS
from discreet.privacy.privacy_ledger import PrivacyLedger, passes
from discreet.training.local_training import example_event, steps_of

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class BudgetSpent(RuntimeError):
    """Another step would pass the budget: it was not made, and nothing was charged for it."""


@dataclass(frozen=True)
class Price:
    """How epsilon is computed, and the most that it may be; None: no bound.

    Raises:
      ValueError: one is out of range; the message names it.
    """

    delta: float
    accountant: str
    max_epsilon: float | None

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be between 0 and 1, both excluded, not {self.delta}")
        if self.accountant not in ACCOUNTANTS:
            raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {self.accountant!r}")
        if self.max_epsilon is not None and not self.max_epsilon > 0:
            raise ValueError(f"max_epsilon must be above 0, not {self.max_epsilon}")

    def check_below(self, num_examples: int) -> None:
        """Raises ValueError if delta allows to publish one example of so many."""
        if self.delta * num_examples >= 1:
            raise ValueError(
                f"delta must be below 1 / {num_examples}, one over the number of examples, not {self.delta}"
            )

    def epsilon(self, spent: PrivacyLedger, delta: float | None = None) -> float:
        """Of what was spent, at `delta`."""
        return spent.epsilon(self.delta if delta is None else delta, self.accountant)


@dataclass
class StepAccount:
    """Charges equal steps of one loop, each before its noise is used, and counts them.

    Attributes:
      event: what one step costs.
      planned: the most steps that the loop takes.
      ledger: a file that outlives the loop, or None. What it says of `holder` counts, from whatever loop.
      taken: the steps of this loop that were charged.
    """

    event: DpEvent
    planned: int
    price: Price
    ledger: DurableLedger | None
    holder: str = ""
    taken: int = 0
    _before: PrivacyLedger = field(default_factory=PrivacyLedger)  # all but the steps since `_first`
    _first: int = 0
    _read_at: Mark | None = None
    _room: int | None = None  # steps since `_first` that the budget has room for; None: not known yet

    def __post_init__(self) -> None:
        self._read()

    def _read(self) -> None:
        """Looks at the file, if another process has changed it: what is spent there, and how far it has come."""
        if self.ledger is None or self._read_at == (mark := self.ledger.mark()):
            return
        self._before = spent_in(self.ledger, self.holder)
        self._read_at, self._first, self._room = mark, self.taken, None

    def spent(self) -> PrivacyLedger:
        """Everything on this holder's data."""
        self._read()
        return self._before.record(self.event, self.taken - self._first)

    def epsilon(self, delta: float | None = None) -> float:
        """Of everything on this holder's data."""
        return self.price.epsilon(self.spent(), delta)

    def charge(self) -> None:
        """One more step. With a file, it is on disk when this returns.

        Raises:
          BudgetSpent: the step would pass the budget.
          LedgerError: the file can't be charged.
        """
        self._require_room()
        while self.ledger is not None and self._read_at is not None:
            charge = Charge(self.taken + 1, EXAMPLE, self.holder, self.event)
            mark = self.ledger.charge_after(self._read_at, [charge])
            if mark is not None:
                self._read_at = mark
                break
            self._read()  # another process has charged this holder: the budget is looked at again
            self._require_room()
        self.taken += 1

    def _require_room(self) -> None:
        most = self.price.max_epsilon
        if most is None:
            return
        if self._room is None:
            self._room = self._most_steps(most)
        if self.taken - self._first >= self._room:
            spent = self.price.epsilon(self.spent())
            raise BudgetSpent(
                f"max_epsilon {most:g} has no room for another step: {self.taken} steps are taken, epsilon is "
                f"{spent:.4g} at delta {self.price.delta:g}, and {max(0.0, most - spent):.2g} is left"
            )

    def _most_steps(self, most: float) -> int:
        """The largest number of further steps, up to the plan's, that does not pass the budget."""

        def beyond(steps: int) -> bool:
            spent = self._before.record(self.event, steps)
            return passes(spent, most, delta=self.price.delta, accountant=self.price.accountant)

        left = self.planned - self._first
        if not beyond(left):
            return left
        return bisect_right(range(left + 1), 0, key=lambda steps: int(beyond(steps))) - 1


def opened(ledger: str | Path | DurableLedger | None) -> DurableLedger | None:
    """The ledger file of a path. LedgerError if it is missing: a new one is made by an explicit act."""
    return DurableLedger(Path(ledger)) if isinstance(ledger, str | Path) else ledger


def spent_in(ledger: DurableLedger | None, holder: str) -> PrivacyLedger:
    """What a ledger file says was spent on a holder's examples; nothing without one."""
    return PrivacyLedger() if ledger is None else ledger.spent(EXAMPLE, holder=holder)


def calibrated(
    target_epsilon: float, settings: LoopSettings, num_examples: int, *, price: Price, spent: PrivacyLedger
) -> LoopSettings:
    """The settings with the least noise with which all their steps, and what was spent before, cost at most a target.

    Raises:
      ValueError: as `noise_multiplier_for_epsilon`: no noise meets the target.
    """
    from dp_accounting import ComposedDpEvent, SelfComposedDpEvent

    steps = steps_of(num_examples, settings)

    def event(noise: float) -> DpEvent:
        step = example_event(num_examples, settings.with_noise(noise))
        return ComposedDpEvent([SelfComposedDpEvent(each, count) for each, count in (*spent.entries, (step, steps))])

    return settings.with_noise(
        noise_multiplier_for_epsilon(
            target_epsilon, make_event=event, count=1, delta=price.delta, accountant=price.accountant
        )
    )
