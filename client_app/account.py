"""A client's own account: what its data has spent, over every round of every run, and whether more may be spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.privacy.accountants import exceeds

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class Refused(RuntimeError):
    """The client does not do this work: its budget or its owner's policy forbids it. The message says why."""


@dataclass(frozen=True)
class Budget:
    """The largest epsilon that may be spent, at the delta of whoever set it."""

    epsilon: float
    delta: float


def check_budgets(guarantee: str, budgets: Sequence[Budget], epsilon: Callable[[float], float]) -> None:
    """Compares what would be spent, `epsilon` of a delta, with each budget.

    Raises:
      Refused: it would pass one of them.
    """
    for budget in budgets:
        after = epsilon(budget.delta)
        if exceeds(after, budget.epsilon):
            raise Refused(
                f"the {guarantee}-level budget is spent: this round would reach epsilon {after:.4g} "
                f"of {budget.epsilon:g} at delta {budget.delta:g}"
            )


@dataclass(frozen=True)
class ClientAccount:
    """Charges a client's example-level and local guarantees to its own ledger, and stops at a budget.

    Attributes:
      ledger: on the client's disk; in a simulation one file holds all virtual clients.
      holder: which client of that file.
      delta, accountant: how the epsilon that is reported is computed: those of the run.
    """

    ledger: DurableLedger
    holder: str
    delta: float
    accountant: str

    def epsilon(self, guarantee: str) -> float:
        """Spent so far, 0 before the first charge."""
        return self.ledger.spent(guarantee, holder=self.holder).epsilon(self.delta, self.accountant)

    def pure_epsilon(self, guarantee: str) -> float:
        """Spent so far as pure epsilon (delta = 0); infinity for Gaussian noise."""
        from discreet.privacy.accounting import pure_epsilon

        return pure_epsilon(self.ledger.spent(guarantee, holder=self.holder).entries)

    def charge(
        self, guarantee: str, event: DpEvent, *, count: int, round_number: int, budgets: Sequence[Budget]
    ) -> float:
        """Writes a charge to disk and returns the epsilon spent with it.

        Raises:
          Refused: the epsilon would pass a budget. Nothing is charged.
        """
        charge = Charge(round_number, guarantee, self.holder, event, count)
        while True:
            spent = self.ledger.spent(guarantee, holder=self.holder)
            after = spent.record(event, count)
            epsilon = partial(after.epsilon, accountant=self.accountant)
            check_budgets(guarantee, budgets, epsilon)
            # A node may serve two runs at once: where the other one has charged since, the budgets are looked at again.
            if self.ledger.charge_after(spent.num_releases, charge):
                return epsilon(self.delta)
