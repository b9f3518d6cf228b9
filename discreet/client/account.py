"""What clients have spent, over every round of every run, and whether more may be spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from discreet.federated.durable_ledger import Charge, DurableLedger, Mark
from discreet.privacy.accountants import exceeds
from discreet.privacy.privacy_ledger import PrivacyLedger

if TYPE_CHECKING:
    from dp_accounting import DpEvent

REMEMBERED = 100_000  # how many clients' ledgers are kept in memory; beyond it they are read from disk again


class Refused(RuntimeError):
    """The client does not do this work: its budget or its owner's policy forbids it. The message says why."""


@dataclass(frozen=True)
class Budget:
    """The largest epsilon that may be spent, at the delta of whoever set it. Delta 0 is pure epsilon: releases that
    have none (Gaussian noise) are not held to it."""

    epsilon: float
    delta: float


@dataclass
class Accounts:
    """Charges the guarantees that clients account themselves, each client by its own name, and stops at a budget.

    Attributes:
      ledger: a node's own, whose only holder is ""; in a simulation one file holds all virtual clients.
      delta, accountant: how the epsilon that is reported is computed: those of the run.
    """

    ledger: DurableLedger
    delta: float
    accountant: str
    _spent: dict[tuple[str, str], PrivacyLedger] = field(default_factory=dict)
    _read_at: Mark | None = None

    def spent(self, guarantee: str, holder: str) -> PrivacyLedger:
        """What is on disk for a guarantee on the data of one client. Read once, and then followed."""
        if self._read_at is None:
            self._read_at = self.ledger.mark()
        if (guarantee, holder) not in self._spent:
            self._spent[guarantee, holder] = self.ledger.spent(guarantee, holder=holder)
        return self._spent[guarantee, holder]

    def epsilon(self, spent: PrivacyLedger) -> float:
        """Of what was spent, 0 before the first charge."""
        return _epsilon(spent, self.delta, self.accountant)

    def after(self, charge: Charge, budgets: Sequence[Budget], *more: Charge) -> PrivacyLedger:
        """What is spent with a charge, and with more of the same guarantee and holder, which are not written yet.

        Raises:
          Refused: it would pass a budget.
        """
        after = self.spent(charge.guarantee, charge.holder)
        for each in (charge, *more):
            after = _recorded(after, each.event, each.count)
        for budget in budgets:
            said = self._beyond(budget, after)
            if said is not None:
                raise Refused(f"the {charge.guarantee}-level budget is spent: this round would reach {said}")
        return after

    def _beyond(self, budget: Budget, spent: PrivacyLedger) -> str | None:
        """How far what would be spent is beyond a budget, in words; None if it is not."""
        if budget.delta == 0:
            pure = pure_epsilon_of(spent)
            beyond = exceeds(pure, budget.epsilon) and pure < math.inf
            return f"a pure epsilon of {pure:.4g} of {budget.epsilon:g}" if beyond else None
        epsilon = _epsilon(spent, budget.delta, self.accountant)
        beyond = exceeds(epsilon, budget.epsilon)
        return f"epsilon {epsilon:.4g} of {budget.epsilon:g} at delta {budget.delta:g}" if beyond else None

    def write(self, charges: Sequence[Charge]) -> bool:
        """Writes charges that were looked at by `after`: all of them are on disk when this returns True.

        A node may serve two runs at once: if the other one has charged one of these clients since its account was
        read, nothing is written, and the budgets have to be looked at again.
        """
        if not charges:
            return True
        before = self._read_at
        assert before is not None
        self._read_at = self.ledger.charge_after(before, charges)
        if self._read_at is None or self._read_at.rows != before.rows + len(charges):
            self._spent.clear()  # somebody else has charged this ledger too
            return self._read_at is not None
        for charge in charges:
            key = charge.guarantee, charge.holder
            self._spent[key] = _recorded(self._spent[key], charge.event, charge.count)
        if len(self._spent) > REMEMBERED:
            self._spent.clear()
        return True


def node_accounts(node_config: Mapping[str, object], *, delta: float, accountant: str) -> Accounts:
    """The accounts of a node, in the ledger that its owner names, or Refused; LedgerError if it can't be used."""
    if "ledger" not in node_config:
        raise Refused("this node has no ledger: start it with --node-config 'ledger=\"/path/ledger.db\"'")
    ledger = DurableLedger(Path(str(node_config["ledger"])))
    ledger.check()
    return Accounts(ledger, delta, accountant)


# Clients with the same history share one computation.
@lru_cache(maxsize=65536)
def _recorded(spent: PrivacyLedger, event: DpEvent, count: int) -> PrivacyLedger:
    return spent.record(event, count)


@lru_cache(maxsize=65536)
def _epsilon(spent: PrivacyLedger, delta: float, accountant: str) -> float:
    return spent.epsilon(delta, accountant)


@lru_cache(maxsize=65536)
def pure_epsilon_of(spent: PrivacyLedger) -> float:
    """As pure epsilon (delta = 0); infinity with Gaussian noise."""
    # Imported here: a client that accounts nothing starts without dp_accounting, in half the time.
    from discreet.privacy.accounting import pure_epsilon

    return pure_epsilon(spent.entries)
