"""What a run has spent by every accountant, from the ledgers in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from discreet.federated.durable_ledger import CLIENTS_LEDGER, DurableLedger, Release
from discreet.federated.guarantees import EXAMPLE, LOCAL, USER
from discreet.privacy.accountants import PLD, RDP
from discreet.privacy.accounting import (
    PRIMIHUB_ORDERS,
    Entries,
    epsilon_spent,
    pure_epsilon,
    rdp_epsilon,
    rdp_epsilon_classic,
)
from discreet.privacy.events import event_from_json
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.reporting.records import RunRecord

MOST_POINTS = 16  # of a curve: each is an epsilon of its own

Curve = list[tuple[float, float]]
Spent = Mapping[str, Entries]

Accountant = Callable[[Entries, float], float]

ACCOUNTANTS: dict[str, Accountant] = {
    PLD: lambda entries, delta: epsilon_spent(entries, delta=delta, accountant=PLD),
    RDP: lambda entries, delta: epsilon_spent(entries, delta=delta, accountant=RDP),
    "rdp, classic conversion": lambda entries, delta: rdp_epsilon_classic(entries, delta=delta),
    "pure (delta = 0)": lambda entries, delta: pure_epsilon(entries),
}

PRIMIHUB: dict[str, Accountant] = {
    "rdp, PrimiHub's orders": lambda entries, delta: rdp_epsilon(entries, delta=delta, orders=PRIMIHUB_ORDERS)
}


def accountants_of(record: RunRecord) -> Mapping[str, Accountant]:
    """What computes the epsilons of a run; PrimiHub's orders only for the experiment that repeats its system."""
    config = record.config
    repeated = (config.data.name, config.privacy.noise) == ("breast_cancer", "secure_sum")
    return ACCOUNTANTS | PRIMIHUB if repeated and config.privacy.example.enabled else ACCOUNTANTS


def spent_by_holder(record: RunRecord, guarantee: str) -> dict[str, Entries]:
    """What the data of each holder has paid for a guarantee; the user level has one holder, "".

    Empty where the guarantee is off, and for client-side guarantees of a federation, whose ledgers are with the
    clients.
    """
    return _by_holder(_releases(record, guarantee))


def worst_holder(spent: Spent, delta: float) -> str | None:
    """The holder with the largest epsilon, or None where nobody has paid."""
    ranked = {entries: ACCOUNTANTS[RDP](entries, delta) for entries in {tuple(e) for e in spent.values()}}
    return max(spent, key=lambda holder: ranked[tuple(spent[holder])], default=None)


def epsilons(
    entries: Entries, delta: float, *, accountants: Mapping[str, Accountant] = ACCOUNTANTS
) -> dict[str, float]:
    """Epsilon by every accountant that knows the events; pure epsilon only where it is finite."""
    found = {}
    for name, accountant in accountants.items():
        try:
            value = accountant(entries, delta)
        except ValueError:  # an event that this accountant does not know: the others speak for it
            continue
        if name != "pure (delta = 0)" or value != float("inf"):
            found[name] = value
    return found


def epsilon_curves(record: RunRecord, guarantee: str) -> dict[str, Curve]:
    """(round, epsilon) by accountant, at each round of the holder that has spent most by then.

    The run's own accountant is read from metrics.csv and has every round, the others at most 16 of them. Empty where
    the guarantee is off.
    """
    own, chosen = record.series(f"epsilon_{guarantee}"), record.config.privacy.accountant
    if not own:
        return {}
    delta, accountants = record.config.privacy.delta, accountants_of(record)
    releases = _releases(record, guarantee)
    curves: dict[str, Curve] = {chosen: own}
    for number in _some_rounds(record):
        spent = _by_holder(release for release in releases if release.round <= number)
        worst = worst_holder(spent, delta)
        found = {} if worst is None else epsilons(spent[worst], delta, accountants=accountants)
        for name, value in found.items():
            if name != chosen:
                curves.setdefault(name, []).append((float(number), value))
    return curves


def guarantee_names(records: Sequence[RunRecord]) -> list[str]:
    """The guarantees that are on in at least one run."""
    return [name for name in (USER, EXAMPLE, LOCAL) if any(record.series(f"epsilon_{name}") for record in records)]


def _releases(record: RunRecord, guarantee: str) -> list[Release]:
    path = record.path / ("ledger.db" if guarantee == USER else CLIENTS_LEDGER)
    if not path.is_file():
        return []
    return [release for release in DurableLedger(path).releases() if release.guarantee == guarantee]


def _by_holder(releases: Iterable[Release]) -> dict[str, Entries]:
    held: dict[str, list[Release]] = {}
    for release in releases:
        held.setdefault(release.holder, []).append(release)
    return {holder: _entries(theirs) for holder, theirs in held.items()}


def _entries(releases: Iterable[Release]) -> Entries:
    counts: dict[str, int] = {}
    for release in releases:
        counts[release.event] = counts.get(release.event, 0) + release.count
    return PrivacyLedger(tuple((event_from_json(text), count) for text, count in counts.items())).entries


def _some_rounds(record: RunRecord) -> list[int]:
    numbers = [int(row["round"]) for row in record.rounds if row["round"]]
    if len(numbers) <= MOST_POINTS:
        return numbers
    last = len(numbers) - 1
    return [numbers[round(last * point / (MOST_POINTS - 1))] for point in range(MOST_POINTS)]
