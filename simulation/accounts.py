"""The accounts of many virtual clients: the same charges, budgets and refusals as one by one, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dp_accounting import DpEvent

from client_app.account import Budget, Refused, check_budgets
from client_app.client import check_asked, check_round, local_settings
from client_app.local_privacy import LocalPrivacy, check_pure_total
from client_app.policy import ClientPolicy, budgets_of
from discreet.config import RunConfig
from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.federated.guarantees import EXAMPLE, LOCAL
from discreet.federated.transport import Failure
from discreet.privacy.accounting import pure_epsilon
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.training.local_training import LocalSettings, example_event, steps_of

# How many clients' ledgers are kept in memory; beyond it they are read from disk again.
REMEMBERED = 100_000


@dataclass
class Accounts:
    """What virtual clients have spent, read from their ledger once and then followed.

    Nobody else writes to the ledger while a simulation runs: it holds its run folder alone.
    """

    ledger: DurableLedger
    delta: float
    accountant: str
    _spent: dict[tuple[str, int], PrivacyLedger] = field(default_factory=dict)
    _charges: list[Charge] = field(default_factory=list)

    def charge(
        self, guarantee: str, client: int, event: DpEvent, *, count: int, round_number: int, budgets: Sequence[Budget]
    ) -> PrivacyLedger:
        """Takes down a charge for `flush`, and returns what is spent with it.

        Raises:
            Refused: the epsilon would pass a budget. Nothing is taken down.
        """
        after = _recorded(self.spent(guarantee, client), event, count)
        check_budgets(guarantee, budgets, lambda delta: _epsilon(after, delta, self.accountant))
        self._charges.append(Charge(round_number, guarantee, str(client), event, count))
        self._spent[guarantee, client] = after
        return after

    def spent(self, guarantee: str, client: int) -> PrivacyLedger:
        """What a guarantee has been charged for a client's data."""
        known = self._spent.get((guarantee, client))
        return self.ledger.spent(guarantee, holder=str(client)) if known is None else known

    def epsilon(self, spent: PrivacyLedger) -> float:
        """Of what was spent. Clients with the same history share one computation."""
        return _epsilon(spent, self.delta, self.accountant)

    def flush(self) -> None:
        """Writes the charges to disk, all or none; before anything is computed that could leave a client."""
        self.ledger.charge(self._charges)
        self._charges.clear()
        if len(self._spent) > REMEMBERED:
            self._spent.clear()


@lru_cache(maxsize=65536)
def _recorded(spent: PrivacyLedger, event: DpEvent, count: int) -> PrivacyLedger:
    return spent.record(event, count)


@lru_cache(maxsize=65536)
def _epsilon(spent: PrivacyLedger, delta: float, accountant: str) -> float:
    return spent.epsilon(delta, accountant)


@dataclass(frozen=True)
class Admitted:
    """Clients that take part, with what is asked of each, and the largest epsilons that they have spent."""

    clients: tuple[int, ...]
    settings: tuple[LocalSettings, ...]
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0


def admit(
    run: RunConfig,
    clients: Sequence[int],
    sizes: Sequence[int],
    *,
    accounts: Accounts | None,
    local: LocalPrivacy | None,
    round_number: int,
) -> tuple[Admitted, list[Failure]]:
    """Checks and charges clients as `client_app.client.DPClient` does before it works; the charges are on disk after.

    Args:
        run: the configuration.
        clients, sizes: their numbers, and how many examples each has.
        accounts: None where no guarantee is on that clients account themselves.
        local: the round's local mechanism.
        round_number: counted from 1.

    Returns:
        Who takes part, and a failure for each client that refuses.
    """
    entry = _Entry(run, accounts, local, round_number)
    asked = {size: entry.asked(size) for size in set(sizes)}
    failures, admitted = [], []
    for client, size in zip(clients, sizes, strict=True):
        try:
            admitted.append((client, asked[size], entry.spent(client, asked[size])))
        except Refused as refusal:
            failures.append(Failure(client, "refused", str(refusal)))
    if accounts is not None:
        accounts.flush()
    largest = [max(values) for values in zip((0.0, 0.0, 0.0), *(spent for _, _, spent in admitted), strict=True)]
    settings = tuple(what.settings for _, what, _ in admitted)
    return Admitted(tuple(client for client, _, _ in admitted), settings, *largest), failures


@dataclass(frozen=True)
class _Asked:
    """What the round asks of a client with some number of examples: `refusal` where it may not be asked at all."""

    settings: LocalSettings
    refusal: str | None
    event: DpEvent | None
    steps: int


@dataclass(frozen=True)
class _Entry:
    """How one client is checked and charged: see `client_app.client.DPClient.answer`."""

    run: RunConfig
    accounts: Accounts | None
    local: LocalPrivacy | None
    round_number: int

    def asked(self, size: int) -> _Asked:
        """Everything that follows from the size alone."""
        settings, refusal = local_settings(self.run, size), None
        try:
            check_round(self.run, self.round_number)
            check_asked(self.run, settings, self.local, num_examples=size, policy=ClientPolicy())
        except Refused as met:
            refusal = str(met)
        steps = steps_of(size, settings)
        charged = settings.example is not None and steps > 0
        return _Asked(settings, refusal, example_event(size, settings) if charged else None, steps)

    def spent(self, client: int, asked: _Asked) -> tuple[float, float, float]:
        """A client's example-level, local and pure local epsilon with this round."""
        if asked.refusal is not None:
            raise Refused(asked.refusal)
        example, local, pure = 0.0, 0.0, 0.0
        if asked.event is not None:
            example = self._epsilon(self._charge(EXAMPLE, client, asked.event, asked.steps))
        if self.local is not None:
            check_pure_total(self.run, self.local, spent=self._account().spent(LOCAL, client))
            spent = self._charge(LOCAL, client, self.local.event, 1)
            local, pure = self._epsilon(spent), pure_epsilon(spent.entries)
        return example, local, pure

    def _charge(self, guarantee: str, client: int, event: DpEvent, count: int) -> PrivacyLedger:
        budgets = budgets_of(ClientPolicy(), self.run, guarantee)
        return self._account().charge(
            guarantee, client, event, count=count, round_number=self.round_number, budgets=budgets
        )

    def _epsilon(self, spent: PrivacyLedger) -> float:
        return self._account().epsilon(spent)

    def _account(self) -> Accounts:
        if self.accounts is None:
            raise Refused("this client has no ledger, and spends nothing it can't write down: start it with one")
        return self.accounts
