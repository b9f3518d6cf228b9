"""What it costs to pick one of several private runs by its result: a release too, about all of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from discreet.federated.guarantees import EXAMPLE, LOCAL, USER
from discreet.privacy.accountants import RDP
from discreet.privacy.accounting import Entries, epsilon_spent
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.selection import SHAPES, TrialCount, selection_epsilon
from discreet.reporting.epsilons import Spent, spent_by_holder
from discreet.reporting.records import RunRecord

# What has to be equal for the same holder to hold the same data in two runs.
SAME_DATA = (
    "data.name",
    "data.path",
    "data.num_clients",
    "data.partition",
    "data.alpha",
    "data.partition_seed",
    "data.examples_per_client",
)


@dataclass(frozen=True)
class ChoiceCost:
    """Epsilons by RDP at one delta, of one guarantee.

    Attributes:
      guarantee: `user`, `example` or `local`.
      delta: the largest of the runs.
      num_runs: that were carried out, those that do not give the guarantee included.
      one_run: the dearest of those that give it.
      all_runs: together. It holds whatever is picked or published of them. Infinite if a run over the same clients does
        not give the guarantee. None if a holder's data is not the same in all of them, or their adjacencies differ.
      drawn: had their number been drawn with mean `num_runs` and only the best been published, by distribution. Empty
        where that theorem does not apply.
      why_not: why `drawn` is empty, or `all_runs` is None or infinite.
    """

    guarantee: str
    delta: float
    num_runs: int
    one_run: float
    all_runs: float | None
    drawn: Mapping[str, float]
    why_not: str


def choice_costs(records: Sequence[RunRecord]) -> list[ChoiceCost]:
    """The cost of choosing among the runs, for each guarantee that at least one of them gives.

    Runs whose noise protects nobody count like the others: as if it had been drawn securely.
    """
    if len(records) < 2:
        return []
    return [cost for guarantee in (USER, EXAMPLE, LOCAL) if (cost := _cost(records, guarantee))]


def _cost(records: Sequence[RunRecord], guarantee: str) -> ChoiceCost | None:
    paying = [record for record in records if record.series(f"epsilon_{guarantee}")]
    if not paying:
        return None
    delta = max(record.config.privacy.delta for record in paying)
    spent = [spent_by_holder(record, guarantee) for record in paying]
    one = _largest((entries for run in spent for entries in run.values()), delta)
    why_not = _why_not_together(records, paying, spent)
    if why_not:
        return ChoiceCost(guarantee, delta, len(records), one, None, {}, why_not)
    if len(paying) < len(records):
        without = len(records) - len(paying)
        why_not = f"no {guarantee}-level guarantee in {without} of the runs, which are over the same clients"
        return ChoiceCost(guarantee, delta, len(records), one, math.inf, {}, why_not)
    together = [_together([run.get(holder, ()) for run in spent]) for holder in set[str]().union(*spent)]
    drawn, why_not = _if_drawn(spent, guarantee, delta)
    return ChoiceCost(guarantee, delta, len(paying), one, _largest(together, delta), drawn, why_not)


def _why_not_together(records: Sequence[RunRecord], paying: Sequence[RunRecord], spent: Sequence[Spent]) -> str:
    if not all(spent):
        return "the clients' ledgers are with the clients"
    if len({tuple(repr(record.settings.get(name)) for name in SAME_DATA) for record in records}) > 1:
        return "the runs deal the data differently, so that a client is not the same in all of them"
    if len({record.config.sampling.kind == "fixed" for record in paying}) > 1:
        return "the runs have different adjacencies"
    return ""


def _if_drawn(spent: Sequence[Spent], guarantee: str, delta: float) -> tuple[dict[str, float], str]:
    if guarantee != USER:
        return {}, "every update of every run reaches the server, which is not trusted here, so the runs add up"
    candidates = list(_distinct(entries for run in spent for entries in run.values()))
    trials = [TrialCount(name, float(len(spent))) for name in SHAPES]
    try:
        return {count.distribution: selection_epsilon(candidates, trials=count, delta=delta) for count in trials}, ""
    except ValueError as error:
        return {}, str(error)


def _largest(spent: Iterable[Entries], delta: float) -> float:
    return max(
        (epsilon_spent(entries, delta=delta, accountant=RDP) for entries in _distinct(spent)),
        default=0.0,
    )


def _distinct(spent: Iterable[Entries]) -> set[Entries]:
    return {tuple(entries) for entries in spent}


def _together(runs: Sequence[Entries]) -> Entries:
    return PrivacyLedger(tuple(entry for entries in runs for entry in entries)).entries
