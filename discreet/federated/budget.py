"""Whether a budget has room for more releases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self

from discreet.client_settings import USER
from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.privacy.accountants import exceeds
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.settings import PrivacyConfig

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class BudgetSpentError(RuntimeError):
    """The next round would pass a budget. The message says which, and what is left."""


@dataclass(frozen=True)
class UserBudget:
    """The largest user-level epsilon at `delta`, by `accountant`; None: no budget.

    Attributes:
      name: of the budget in messages, a setting.
      whose: what has spent the epsilon, in words; empty for a single run.
    """

    max_epsilon: float | None
    delta: float
    accountant: str
    name: str = "privacy.user.max_epsilon"
    whose: str = ""

    @classmethod
    def of(cls, privacy: PrivacyConfig) -> Self:
        """The budget that a configuration names."""
        return cls(privacy.user.max_epsilon, privacy.delta, privacy.accountant)

    def epsilon(self, spent: PrivacyLedger) -> float:
        """Of what was spent, 0 before the first release."""
        return _epsilon(spent, self.delta, self.accountant)

    def require_room(self, spent: PrivacyLedger, charges: Iterable[Charge], what: str = "the next round") -> None:
        """Raises BudgetSpentError if these charges, for `what`, would pass the budget after what was spent."""
        if self.max_epsilon is None:
            return
        after = spent
        for charge in charges:
            after = after.record(charge.event, charge.count)
        if exceeds(self.epsilon(after), self.max_epsilon):
            left = max(0.0, self.max_epsilon - self.epsilon(spent))
            raise BudgetSpentError(
                f"{what} would reach a user-level epsilon of {self.epsilon(after):.4g}{self.whose}, beyond "
                f"{self.name}={self.max_epsilon:g}; {left:.4g} is left"
            )


def require_room_for(event: DpEvent, what: str, *, ledger: DurableLedger, privacy: PrivacyConfig) -> None:
    """Raises BudgetSpentError if a release with this event, for `what`, would pass the budget: that of all runs over
    the population if the ledger charges an account, else that of the run."""
    charges = [Charge(0, USER, "", event)]
    if ledger.account is not None:
        ledger.account.require_room(charges, what)
        return
    UserBudget.of(privacy).require_room(ledger.spent(USER), charges, what)


@lru_cache(maxsize=256)
def _epsilon(spent: PrivacyLedger, delta: float, accountant: str) -> float:
    return spent.epsilon(delta, accountant)
