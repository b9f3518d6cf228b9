"""The spending of runs by every accountant, from their ledgers; the price of federated evaluation,
and of selecting among runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from discreet.accounting.accounting import (
    PRIMIHUB_ORDERS,
    Entries,
    epsilon_spent,
    pure_epsilon,
    rdp_epsilon,
)
from discreet.accounting.events import PLD, RDP
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.durable_ledger import CLIENTS_LEDGER, DurableLedger, Release, by_data_owner
from discreet.mechanisms.mechanism import SERVER, releases_of
from discreet.mechanisms.mechanism_table import own_noise, server_mechanism
from discreet.reporting.records import Pairs, RunRecord, matters
from discreet.settings.adjacency import GUARANTEES
from discreet.settings.data import DataConfig

MOST_POINTS = 16  # of a curve: computing each point takes time
PURE = "pure (delta = 0)"

Spent = Mapping[str, Entries]  # the spending of each data owner's data

ACCOUNTANTS: dict[str, Callable[[Entries, float], float]] = {
    PLD: lambda entries, delta: epsilon_spent(entries, delta=delta, accountant=PLD),
    RDP: lambda entries, delta: epsilon_spent(entries, delta=delta, accountant=RDP),
    "rdp, classic conversion": lambda entries, delta: rdp_epsilon(
        entries, delta=delta, orders=PRIMIHUB_ORDERS, classic=True
    ),
    PURE: lambda entries, delta: pure_epsilon(entries),
}

# The settings of the data that may differ while each data owner holds the same data.
NOT_DEALT = ("public_num_examples", "normalise", "agreed")
DEALT = [each.name for each in fields(DataConfig) if each.name not in NOT_DEALT]


def spent_by_data_owner(record: RunRecord, guarantee: str) -> dict[str, Entries]:
    """The spending of each data owner's data for a guarantee; the user level has one data owner,
    "". Empty if the guarantee is off, and for client-side guarantees of a federation, whose ledgers
    the clients keep."""
    return _entries(_releases(record, guarantee))


def _entries(releases: Iterable[Release]) -> dict[str, Entries]:
    return {name: spent.entries for name, spent in by_data_owner(releases).items()}


def _releases(record: RunRecord, guarantee: str) -> list[Release]:
    mechanism = record.plan.mechanisms.get(guarantee)
    at_server = mechanism is None or SERVER in mechanism.charged_at
    path = record.path / ("ledger.db" if at_server else CLIENTS_LEDGER)
    if not path.is_file():
        return []
    rows = DurableLedger(path).whole().releases()
    return [release for release in rows if release.guarantee == guarantee]


def worst_epsilons(spent: Spent, delta: float) -> dict[str, float]:
    """Epsilon of the data owner that has spent most, by every accountant that knows the events;
    empty without spending. Pure epsilon is included only if it is finite."""
    distinct = {tuple(entries) for entries in spent.values()}
    if not distinct:
        return {}
    worst = max(distinct, key=lambda entries: ACCOUNTANTS[RDP](entries, delta))
    found = dict[str, float]()
    for name, accountant in ACCOUNTANTS.items():
        try:
            value = accountant(worst, delta)
        except ValueError:  # this accountant does not know an event; others do
            continue
        if name != PURE or value != math.inf:
            found[name] = value
    return found


def epsilon_curves(record: RunRecord, guarantee: str) -> dict[str, Pairs]:
    """(round, epsilon) by accountant, at each round for the data owner that has spent most by then.
    The curve of the run's own accountant comes from metrics.csv and has every round; the others
    have at most 16 points. Empty if the guarantee is off."""
    own = record.series(f"epsilon_{guarantee}")
    privacy = record.config.privacy
    if not own:
        return {}
    curves: dict[str, Pairs] = {privacy.accountant: own}
    numbers = [number for number, _ in own]
    releases = _releases(record, guarantee)
    step = (len(numbers) - 1) / max(1, min(len(numbers), MOST_POINTS) - 1)
    for number in [numbers[round(point * step)] for point in range(min(len(numbers), MOST_POINTS))]:
        spent = _entries(release for release in releases if release.round <= number)
        for name, value in worst_epsilons(spent, privacy.delta).items():
            if name != privacy.accountant:
                curves.setdefault(name, []).append((number, value))
    return curves


def guarantee_names(records: Sequence[RunRecord]) -> list[str]:
    """The guarantees that are on in at least one run."""
    return [
        name for name in GUARANTEES if any(record.series(f"epsilon_{name}") for record in records)
    ]


def ratings_cost(record: RunRecord) -> Iterator[str]:
    """The price of a run's federated evaluation, in sentences: epsilons by the run's own accountant
    at its delta."""
    config = record.config
    times = len({number for number, _ in record.ratings})
    privacy = config.privacy
    ratings = f"{times} rating{'s' if times > 1 else ''}"
    account = ACCOUNTANTS[privacy.accountant]
    how = f"by {privacy.accountant} at delta {privacy.delta:g}"
    run = replace(record.plan.run, evaluation=replace(config.evaluation, kind="none"))
    unrated = server_mechanism(run)
    if unrated and run.configured_noise_multiplier(unrated.guarantee) is not None:
        name = unrated.guarantee
        without = account(releases_of(unrated, run, len(record.rounds)), privacy.delta)
        yield (
            f"{name}-level: epsilon {record.epsilon(name):.4g} with {ratings}, {without:.4g} "
            f"without, {how}."
        )
    for guarantee, mechanism in record.plan.mechanisms.items():
        if SERVER not in mechanism.charged_at:
            own = own_noise(record.plan.run)
        else:
            own = None
        if own is not None and math.isfinite(record.epsilon(guarantee)):
            alone = account([(own.privacy.event, times)], privacy.delta)
            yield (
                f"{guarantee}-level: epsilon {record.epsilon(guarantee):.4g} of the client that "
                f"has spent most; its answers to {ratings}, if it gave them all, cost {alone:.4g} "
                f"alone, {how}."
            )


def choice_costs(records: Sequence[RunRecord], others: Sequence[RunRecord] = ()) -> list[str]:
    """The price of selecting one of several runs by its result, which is a release too: a sentence
    for each guarantee. Each states epsilons by RDP at the largest delta of the runs: for the most
    expensive run, and for all runs together, which holds whatever is selected or published. Runs
    whose noise protects nobody count like the others.

    Args:
      others: the runs that finished no round (`runs_and_spenders`).
    """
    costs = []
    names = guarantee_names(records)
    for name in GUARANTEES:
        spent = [record for record in others if spent_by_data_owner(record, name)]
        if len(records) + len(spent) > 1 and (spent or name in names):
            costs.append(_choice_cost(records, spent, name))
    return costs


def _choice_cost(records: Sequence[RunRecord], others: Sequence[RunRecord], guarantee: str) -> str:
    finished = [record for record in records if record.series(f"epsilon_{guarantee}")]
    paying = [*finished, *others]
    delta = max(record.config.privacy.delta for record in paying)
    spent = [spent_by_data_owner(record, guarantee) for record in paying]
    one = "one"
    if not all(spent):
        together = "not stated"
        why = "the clients keep their ledgers themselves"
    elif differ := _difference([*records, *others], paying, guarantee):
        together = "not stated"
        why = differ
    elif without := len(records) - len(finished):
        together = "inf"
        one = "the most expensive of the others"
        why = (
            f"no {guarantee}-level guarantee in {without} of the runs, which are over the same "
            "clients"
        )
    else:
        together = f"{_largest(_added_up(spent), delta):.4g}"
        why = "the runs add up"
    costliest = _largest((entries for run in spent for entries in run.values()), delta)
    if len(records) > 1:
        runs = f"all {len(records)} runs"
    else:
        runs = "the run"
    if others:
        runs += f" and {len(others)} without a round"
    return (
        f"{guarantee}-level, choosing the best: epsilon {together} for {runs}, "
        f"{costliest:.4g} for {one} (rdp, delta {delta:g}); {why}"
    )


def _difference(
    records: Sequence[RunRecord], paying: Sequence[RunRecord], guarantee: str
) -> str | None:
    """The reason why the spending of `paying` does not add up; None if it does. `records`: these
    and the runs without the guarantee."""
    if len({_dealing(record) for record in records}) > 1:
        return "the runs deal the data differently, so that a client is not the same in all of them"
    said = [record.guarantees[GUARANTEES.index(guarantee)] for record in paying]
    if len(units := dict.fromkeys(each.unit for each in said)) > 1:
        return f"the runs protect different units: {'; or '.join(units)}"
    if len(neighbours := dict.fromkeys(each.adjacency for each in said)) > 1:
        return f"the runs have different adjacencies: {'; or '.join(neighbours)}"
    return None


def _dealing(record: RunRecord) -> tuple[str, ...]:
    """The settings that decide which data each data owner holds."""
    return tuple(
        repr(getattr(record.config.data, name)) for name in DEALT if matters(record, f"data.{name}")
    )


def _added_up(spent: Sequence[Spent]) -> Iterator[Entries]:
    """The spending of each data owner over all runs. What a server charges, under the name "", is
    spent by all of them."""
    for data_owner in set[str]().union(*spent):
        names = dict.fromkeys((data_owner, ""))
        yield tuple(entry for run in spent for name in names for entry in run.get(name, ()))


def _largest(spent: Iterable[Entries], delta: float) -> float:
    distinct = {PrivacyLedger(tuple(entries)).entries for entries in spent}
    return max((ACCOUNTANTS[RDP](entries, delta) for entries in distinct), default=0.0)
