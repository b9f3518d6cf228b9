"""A privacy budget, and the check that it has room for more releases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from discreet.accounting.privacy_ledger import PrivacyLedger, epsilon_of, exceeds_budget
from discreet.ledger.charges import Charge
from discreet.settings.adjacency import USER
from discreet.settings.wording import Key, Wording


class BudgetSpent(RuntimeError):
    """The next round, or the next step of a loop, would exceed a budget. The message names the
    budget and says how much is left."""


@dataclass(frozen=True)
class ServerBudget:
    """The largest epsilon of a guarantee that the server accounts for, at `delta` by `accountant`;
    None: no budget.

    Attributes:
      guarantee: user; example if clients share a step under secure aggregation.
      name: name of the budget's setting, for messages.
      whose: a phrase for what has spent the epsilon; empty for a single run.
    """

    max_epsilon: float | None
    delta: float
    accountant: str
    name: str = "privacy.user.max_epsilon"
    whose: str = ""
    guarantee: str = USER

    def epsilon(self, spent: PrivacyLedger) -> float:
        """The epsilon of the releases so far, 0 before the first."""
        return epsilon_of(spent, self.delta, self.accountant)

    def require_room(
        self, spent: PrivacyLedger, charges: Iterable[Charge], what: str = "the next round"
    ) -> None:
        """Raises BudgetSpent if these charges, for `what`, would exceed the budget on top of
        `spent`."""
        if self.max_epsilon is None:
            return
        after = spent
        for charge in charges:
            after = after.record(charge.event, charge.count)
        if exceeds_budget(after, self.max_epsilon, delta=self.delta, accountant=self.accountant):
            left = max(0.0, self.max_epsilon - self.epsilon(spent))
            if self.guarantee == USER:
                level = "a user-level"
            else:
                level = "an example-level"
            reached = f"{what} would reach {level} epsilon of {self.epsilon(after):.4g}{self.whose}"
            most = Key(f"{self.name}={self.max_epsilon:g}")
            raise BudgetSpent(Wording(f"{reached}, beyond ", most, f"; {left:.4g} is left"))
