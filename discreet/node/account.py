"""The accounts of clients: their privacy spending over all rounds of all runs, and the budgets that
limit it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from discreet.accounting.events import RDP
from discreet.accounting.privacy_ledger import PrivacyLedger, epsilon_of, exceeds_budget
from discreet.ledger.durable_ledger import (
    CLIENTS_LEDGER,
    Charge,
    DurableLedger,
    LedgerError,
    LedgerPosition,
)
from discreet.ledger.owner_account import check_unit, other_unit
from discreet.protocol.messages import EPSILONS, VirtualClient
from discreet.settings.adjacency import EXAMPLE, GUARANTEES, LOCAL
from discreet.settings.client_settings import ClientSettings

if TYPE_CHECKING:
    from dp_accounting import DpEvent

logger = logging.getLogger("discreet.client")

REMEMBERED = (
    100_000  # how many clients' ledgers are kept in memory; beyond it they are read from disk again
)


class Refused(RuntimeError):
    """The client does not do this work, because its budget or its owner's policy forbids it. The
    message gives the reason."""


@dataclass(frozen=True)
class Budget:
    """The largest epsilon that may be spent, at the delta of the party that set it; delta 0 means
    pure epsilon.

    `guarantee`: the guarantee whose releases it limits. None, as in an owner's budget: the releases
    of all guarantees, as one account."""

    epsilon: float
    delta: float
    guarantee: str | None = None


@dataclass
class Accounts:
    """Charges the guarantees that clients account themselves, under each client's name, and stops
    at a budget.

    Attributes:
      ledger: a node's own ledger, whose only data owner is ""; in a simulation, one file for all
        virtual clients.
      delta, accountant: those of the run, used to compute the reported epsilon.
    """

    ledger: DurableLedger
    delta: float
    accountant: str
    _spent: dict[tuple[str, str], PrivacyLedger] = field(default_factory=dict)
    _read_at: LedgerPosition | None = None

    def spent(self, guarantee: str, data_owner: str) -> PrivacyLedger:
        """The releases on disk for a guarantee on one client's data. They are read once and then
        tracked."""
        if self._read_at is None:
            self._read_at = self.ledger.position()
        if (guarantee, data_owner) not in self._spent:
            self._spent[guarantee, data_owner] = self.ledger.spent(guarantee, data_owner=data_owner)
        return self._spent[guarantee, data_owner]

    def epsilon(self, spent: PrivacyLedger) -> float:
        """The reported epsilon; 0 before the first charge."""
        return epsilon_of(spent, self.delta, self.accountant)

    def reported(self, spent: Mapping[str, PrivacyLedger]) -> dict[str, Any]:
        """The epsilons of this spending by their names in a reply; 0 for a guarantee without."""
        found: dict[str, Any] = dict.fromkeys(EPSILONS, 0.0)
        if EXAMPLE in spent:
            found["epsilon_example"] = self.epsilon(spent[EXAMPLE])
        if LOCAL in spent:
            found["epsilon_local"] = self.epsilon(spent[LOCAL])
            found["epsilon_local_pure"] = epsilon_of(spent[LOCAL], 0.0, RDP)
        return found

    def after(
        self, charges: Sequence[Charge], budgets: Iterable[Budget]
    ) -> dict[str, PrivacyLedger]:
        """The spending of each guarantee if the charges of one round, not yet written, are added
        for a data owner.

        Raises:
          Refused: it would exceed a budget, or the ledger was charged for another unit.
        """
        for each in charges:
            if each.guarantee == EXAMPLE:
                self._check_unit(each.data_owner)
        after = {each.guarantee: self.spent(each.guarantee, each.data_owner) for each in charges}
        for each in charges:
            after[each.guarantee] = _recorded(after[each.guarantee], each.event, each.count)
        for budget in budgets:
            if budget.guarantee is None:
                name = "budget of max-epsilon, for all guarantees together,"
                data_owner = charges[0].data_owner
                held = _together(
                    *(after.get(each) or self._all(each, data_owner) for each in GUARANTEES)
                )
            else:
                name = f"{budget.guarantee}-level budget"
                held = after[budget.guarantee]
            if exceeds_budget(held, budget.epsilon, delta=budget.delta, accountant=self.accountant):
                said = (
                    f"{epsilon_of(held, budget.delta, self.accountant):.4g} of {budget.epsilon:g}"
                )
                if budget.delta:
                    said = f"epsilon {said} at delta {budget.delta:g}"
                else:
                    said = f"a pure epsilon of {said}"
                raise Refused(f"the {name} is spent: this round would reach {said}")
        return after

    def _check_unit(self, account: str) -> None:
        try:
            check_unit(account, partial(self.spent, EXAMPLE))
        except LedgerError:  # names the file, which does not leave
            raise
        except ValueError as error:
            raise Refused(f"this client's ledger {error}") from error

    def _all(self, guarantee: str, account: str) -> PrivacyLedger:
        """The releases for a guarantee, with any unit."""
        parts = (self.spent(guarantee, name) for name in (account, other_unit(account)))
        return PrivacyLedger(tuple(entry for part in parts for entry in part.entries))

    def write(self, charges: Sequence[Charge]) -> bool:
        """Writes charges that `after` has checked. All of them are on disk when this returns True.

        A node may serve two runs at once. If the other run has charged one of these clients since
        its account was read, nothing is written, and the budgets must be checked again.
        """
        if not charges:
            return True
        before = self._read_at
        assert before is not None
        self._read_at = self.ledger.charge(charges, since=before)
        if self._read_at is None or self._read_at.rows != before.rows + len(charges):
            self._spent.clear()  # somebody else has charged this ledger too
            return self._read_at is not None
        for charge in charges:
            key = charge.guarantee, charge.data_owner
            self._spent[key] = _recorded(self._spent[key], charge.event, charge.count)
        if len(self._spent) > REMEMBERED:
            self._spent.clear()
        return True


def accounts_of(
    run: ClientSettings, virtual: VirtualClient | None, node_config: Mapping[str, object]
) -> Accounts:
    """The accounts of a virtual client, in the run folder, or of a node, in its owner's ledger
    file.

    Raises:
      Refused: the owner names no ledger.
      LedgerError: a node's ledger is missing, damaged, or older than what was charged to it.
    """
    if virtual is not None:
        return Accounts(
            DurableLedger(Path(virtual.state_folder) / CLIENTS_LEDGER), run.delta, run.accountant
        )
    if "ledger" not in node_config:
        raise Refused(
            "this node has no ledger: start it with --node-config 'ledger=\"/path/ledger.db\"'"
        )
    ledger = DurableLedger(Path(str(node_config["ledger"])).absolute())
    ledger.check(all_rows=False)
    return Accounts(ledger, run.delta, run.accountant)


def say_spent(event: str, what: str, number: int, **spent: float) -> None:
    """Logs what a node has sent in a round, and its privacy spending by its own account, for each
    guarantee."""
    known = [f"{name} {value:.4g}" for name, value in spent.items() if 0 < value < math.inf]
    logger.info(
        "round %d: %s sent; spent by this node's own account: epsilon %s",
        number,
        what,
        ", ".join(known) or "none",
        extra={
            "fields": {"event": event, "round": number}
            | {f"epsilon_{name}": spent[name] for name in spent}
        },
    )


# Clients with the same history share one computation.
@lru_cache(maxsize=65536)
def _recorded(spent: PrivacyLedger, event: DpEvent, count: int) -> PrivacyLedger:
    return spent.record(event, count)


@lru_cache(maxsize=65536)
def _together(user: PrivacyLedger, example: PrivacyLedger, local: PrivacyLedger) -> PrivacyLedger:
    """All releases about a client's data as one account.

    A change of one example is a change of the client's data, so protection of the whole client
    protects each example too. A masked sum is accounted for zeroing out the client. If its data
    change instead, its contribution moves by up to twice as much, so beside releases that are
    accounted for a change the sum counts for twice the sensitivity.
    """
    others = (*example.entries, *local.entries)
    if not others:
        return user
    return PrivacyLedger((*((_at_twice(event), count) for event, count in user.entries), *others))


def _at_twice(event: DpEvent) -> DpEvent:
    from dp_accounting import NonPrivateDpEvent

    if event == NonPrivateDpEvent():
        return event
    # TypeError: it is not a masked sum
    return replace(event, sensitivity_squared=4 * event.sensitivity_squared)
