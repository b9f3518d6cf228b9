"""The spending of runs by every accountant, from their ledgers; the price of ratings, and of choosing among runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dp_accounting import GaussianDpEvent, LaplaceDpEvent

from discreet.federated.durable_ledger import CLIENTS_LEDGER, DurableLedger, Release
from discreet.federated.guarantees import mechanisms_of, server_mechanism
from discreet.mechanisms.mechanism import releases_of, terms_of
from discreet.privacy.accounting import PRIMIHUB_ORDERS, Entries, epsilon_spent, pure_epsilon, rdp_epsilon
from discreet.privacy.events import PLD, RDP, event_from_json
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.selection import SHAPES, TrialCount, selection_epsilon
from discreet.reporting.records import Pairs, RunRecord
from discreet.settings.privacy import EXAMPLE, GUARANTEES, LOCAL, USER

MOST_POINTS = 16  # of a curve: each point takes an accountant's time
PURE = "pure (delta = 0)"

Spent = Mapping[str, Entries]  # what each holder's data have paid
Accountant = Callable[[Entries, float], float]

ACCOUNTANTS: dict[str, Accountant] = {
    PLD: lambda entries, delta: epsilon_spent(entries, delta=delta, accountant=PLD),
    RDP: lambda entries, delta: epsilon_spent(entries, delta=delta, accountant=RDP),
    "rdp, classic conversion": lambda entries, delta: rdp_epsilon(
        entries, delta=delta, orders=PRIMIHUB_ORDERS, classic=True
    ),
    PURE: lambda entries, delta: pure_epsilon(entries),
}

PRIMIHUB: dict[str, Accountant] = {
    "rdp, PrimiHub's orders": lambda entries, delta: rdp_epsilon(entries, delta=delta, orders=PRIMIHUB_ORDERS)
}

# Settings that have to be equal for a holder to hold the same data in two runs.
SAME_DATA = ("name", "path", "num_clients", "partition", "alpha", "partition_seed", "examples_per_client")


def accountants_of(record: RunRecord) -> Mapping[str, Accountant]:
    """The accountants of a run; PrimiHub's orders only for the experiment that repeats its system."""
    config = record.config
    repeated = (config.data.name, config.privacy.noise) == ("breast_cancer", "secure_sum")
    return ACCOUNTANTS | PRIMIHUB if repeated and EXAMPLE in mechanisms_of(config) else ACCOUNTANTS


def spent_by_holder(record: RunRecord, guarantee: str) -> dict[str, Entries]:
    """The spending of each holder's data for a guarantee; the user level has one holder, "".

    Empty if the guarantee is off, and for client-side guarantees of a federation, whose ledgers the clients keep.
    """
    return _by_holder(_releases(record, guarantee))


def worst_holder(spent: Spent, delta: float) -> str | None:
    """The holder with the largest epsilon, or None if nobody has paid."""
    ranked = {entries: ACCOUNTANTS[RDP](entries, delta) for entries in {tuple(each) for each in spent.values()}}
    return max(spent, key=lambda holder: ranked[tuple(spent[holder])], default=None)


def epsilons(
    entries: Entries, delta: float, *, accountants: Mapping[str, Accountant] = ACCOUNTANTS
) -> dict[str, float]:
    """Epsilon by every accountant that knows the events; pure epsilon only if it is finite."""
    found = {}
    for name, accountant in accountants.items():
        try:
            value = accountant(entries, delta)
        except ValueError:  # this accountant does not know an event: the others speak for it
            continue
        if name != PURE or value != math.inf:
            found[name] = value
    return found


def epsilon_curves(record: RunRecord, guarantee: str) -> dict[str, Pairs]:
    """(round, epsilon) by accountant, at each round of the holder that has spent most by then.

    The curve of the run's own accountant comes from metrics.csv and has every round; the others have at most 16
    points. Empty if the guarantee is off.
    """
    own, chosen = record.series(f"epsilon_{guarantee}"), record.config.privacy.accountant
    if not own:
        return {}
    delta, accountants = record.config.privacy.delta, accountants_of(record)
    releases = _releases(record, guarantee)
    curves: dict[str, Pairs] = {chosen: own}
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
    return [name for name in GUARANTEES if any(record.series(f"epsilon_{name}") for record in records)]


def _releases(record: RunRecord, guarantee: str) -> list[Release]:
    mechanism = mechanisms_of(record.config).get(guarantee)
    path = record.path / ("ledger.db" if mechanism is None or mechanism.at_server else CLIENTS_LEDGER)
    if not path.is_file():
        return []
    return [release for release in DurableLedger(path).releases() if release.guarantee == guarantee]


def _by_holder(releases: Iterable[Release]) -> dict[str, Entries]:
    held: dict[str, Counter[str]] = {}
    for release in releases:
        held.setdefault(release.holder, Counter())[release.event] += release.count
    return {
        holder: PrivacyLedger(tuple((event_from_json(text), count) for text, count in events.items())).entries
        for holder, events in held.items()
    }


def _some_rounds(record: RunRecord) -> list[int]:
    numbers = [int(row["round"]) for row in record.rounds if row["round"]]
    last = len(numbers) - 1
    if last < MOST_POINTS:
        return numbers
    return [numbers[round(last * point / (MOST_POINTS - 1))] for point in range(MOST_POINTS)]


def ratings_cost(record: RunRecord) -> Iterator[str]:
    """The price of the ratings of a run, in sentences: epsilons by the run's own accountant at its delta."""
    config, times = record.config, len({number for number, _ in record.ratings})
    privacy, ratings = config.privacy, f"{times} rating{'s' if times > 1 else ''}"
    account, how = ACCOUNTANTS[privacy.accountant], f"by {privacy.accountant} at delta {privacy.delta:g}"
    unrated = server_mechanism(replace(config, evaluation=replace(config.evaluation, kind="none")))
    if unrated and (noise := terms_of(unrated).noise_multiplier) is not None:
        name, without = unrated.guarantee, account(releases_of(unrated, noise, len(record.rounds)), privacy.delta)
        yield f"{name}-level: epsilon {record.epsilon(name):.4g} with {ratings}, {without:.4g} without, {how}."
    noised = LaplaceDpEvent if privacy.local.kind == "laplace" else GaussianDpEvent
    for guarantee in (EXAMPLE, LOCAL):
        if math.isfinite(record.epsilon(guarantee)):
            alone = account([(noised(config.evaluation.noise_multiplier), times)], privacy.delta)
            yield (
                f"{guarantee}-level: epsilon {record.epsilon(guarantee):.4g} of the client that has spent most; its "
                f"answers to {ratings}, if it gave them all, cost {alone:.4g} alone, {how}."
            )


@dataclass(frozen=True)
class ChoiceCost:
    """The price of picking one of several runs by its result, which is a release too: epsilons by RDP at one delta.

    Attributes:
      guarantee: `user`, `example` or `local`.
      delta: the largest of the runs.
      num_runs: how many were carried out, including those that do not give the guarantee.
      one_run: the largest epsilon of the runs that give it.
      all_runs: of all runs together. It holds whatever is picked or published of them. Infinite if a run over the same
        clients does not give the guarantee. None if a holder's data are not the same in all of them, or their
        adjacencies differ.
      drawn: the cost if the number of runs had been drawn with mean `num_runs` and only the best published, by the
        distribution of that number. Empty if that theorem does not apply.
      why_not: why `drawn` is empty, or `all_runs` is None or infinite.
    """

    guarantee: str
    delta: float
    num_runs: int
    one_run: float
    all_runs: float | None
    drawn: Mapping[str, float]
    why_not: str

    def __str__(self) -> str:
        drawn = "; ".join(f"{name} {value:.4g}" for name, value in self.drawn.items())
        if_drawn = f"if their number had been drawn at random: {drawn}" if drawn else self.why_not
        all_runs = "not stated" if self.all_runs is None else f"{self.all_runs:.4g}"
        one = "one" if self.all_runs != math.inf else "the dearest of the others"
        return (
            f"{self.guarantee}-level, choosing the best: epsilon {all_runs} for all {self.num_runs} runs, "
            f"{self.one_run:.4g} for {one} (rdp, delta {self.delta:g}); {if_drawn}"
        )


def choice_costs(records: Sequence[RunRecord]) -> list[ChoiceCost]:
    """The cost of choosing among the runs, for each guarantee that at least one of them gives.

    Runs whose noise protects nobody count like the others: as if their noise had been drawn securely.
    """
    return [_choice_cost(records, name) for name in guarantee_names(records)] if len(records) > 1 else []


def _choice_cost(records: Sequence[RunRecord], guarantee: str) -> ChoiceCost:
    paying = [record for record in records if record.series(f"epsilon_{guarantee}")]
    delta = max(record.config.privacy.delta for record in paying)
    spent = [spent_by_holder(record, guarantee) for record in paying]
    all_runs: float | None = None
    drawn: Mapping[str, float] = {}
    if why_not := _why_not_together(records, paying, spent):
        pass
    elif without := len(records) - len(paying):
        all_runs = math.inf
        why_not = f"no {guarantee}-level guarantee in {without} of the runs, which are over the same clients"
    else:
        holders = set[str]().union(*spent)
        together = (tuple(entry for run in spent for entry in run.get(holder, ())) for holder in holders)
        all_runs = _largest(together, delta)
        drawn, why_not = _if_drawn(spent, guarantee, delta)
    one_run = _largest((entries for run in spent for entries in run.values()), delta)
    return ChoiceCost(guarantee, delta, len(records), one_run, all_runs, drawn, why_not)


def _why_not_together(records: Sequence[RunRecord], paying: Sequence[RunRecord], spent: Sequence[Spent]) -> str:
    if not all(spent):
        return "the clients keep their ledgers themselves"
    if len({tuple(repr(record.settings.get(f"data.{name}")) for name in SAME_DATA) for record in records}) > 1:
        return "the runs deal the data differently, so that a client is not the same in all of them"
    if len({record.config.sampling.kind == "fixed" for record in paying}) > 1:
        return "the runs have different adjacencies"
    return ""


def _if_drawn(spent: Sequence[Spent], guarantee: str, delta: float) -> tuple[Mapping[str, float], str]:
    if guarantee != USER:
        return {}, "every update of every run reaches the server, which is not trusted here, so the runs add up"
    candidates = list({tuple(entries) for run in spent for entries in run.values()})
    trials = [TrialCount(name, float(len(spent))) for name in SHAPES]
    try:
        return {count.distribution: selection_epsilon(candidates, trials=count, delta=delta) for count in trials}, ""
    except ValueError as error:
        return {}, str(error)


def _largest(spent: Iterable[Entries], delta: float) -> float:
    distinct = {PrivacyLedger(tuple(entries)).entries for entries in spent}
    return max((ACCOUNTANTS[RDP](entries, delta) for entries in distinct), default=0.0)
