"""One account for all runs on the same people: the total privacy spending of a population.

If `privacy.user.account` names an account, each charge to a run's own ledger is charged to the
account first, and `max_epsilon` holds over all that the account has: the epsilon of all runs
together, by composition of every event that any of them charged. Adjacency and unit are those of
`privacy.user`.

An account is a `DurableLedger`: made once, chained, known to this machine. Its rows bear the run
that charged them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from discreet.accounting.events import ACCOUNTANTS, RDP
from discreet.ledger.budget import BudgetSpent, ServerBudget
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.planning.plan import Plan
from discreet.run_files.run_folder import ACCOUNT, RunFolder
from discreet.settings.adjacency import USER
from discreet.settings.rules import require
from discreet.settings.wording import Key, Wording

ADJACENCIES = ("add or remove one client", "replace one client")
SETTINGS = {  # which setting decides a fact of a population
    "name": "sampling.population_name",
    "size": "sampling.population_size",
    "adjacency": "sampling.kind",
    "delta": "privacy.delta",
}
LIMIT = "max_epsilon"


@dataclass(frozen=True)
class Population:
    """The population of an account and the meaning of its epsilon: neighbours differ by
    `adjacency`, at `delta`."""

    name: str
    size: int
    adjacency: str
    delta: float

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "the name of a population", "a text", "''")
        require(self.size >= 1, "the size of a population", "at least 1", self.size)
        rule = f"within (0, 1 / {self.size}), one in its clients"
        require(0 < self.delta < 1 / self.size, "the delta of a population", rule, self.delta)

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The population of a run that names one."""
        kind = ADJACENCIES[plan.run.user.sampling == "fixed"]
        return cls(
            plan.population_name,
            plan.run.user.population_size,
            kind,
            plan.run.delta,
        )


class PopulationAccount:
    """The account of a population in a file, as one run uses it. `budget`: the limit for all runs
    together, unless the account was made with a smaller one. LedgerError, with the setting's name:
    the account is missing, damaged, or belongs to another population."""

    def __init__(self, path: Path, population: Population, budget: ServerBudget) -> None:
        if not path.is_file():
            raise LedgerError(_missing(path, population))
        self.path = path
        self.ledger = DurableLedger(path)
        self.population = population
        self.run = ""
        facts = self.ledger.facts()
        if not is_account(facts):
            other = " is the ledger of a run or of a node, not of a population"
            raise LedgerError(Wording(_key(path), other))
        for name, setting in SETTINGS.items():
            if facts[name] != getattr(population, name):
                there = f": the population's {name} is {facts[name]} there, and "
                here = f"{getattr(population, name)} in this run"
                fault = Wording(Key(setting), " does not fit ", _key(path), there, here)
                raise LedgerError(fault)
        largest = min(
            (each for each in (budget.max_epsilon, facts[LIMIT]) if each is not None), default=None
        )
        if largest == budget.max_epsilon:
            name = budget.name
        else:
            name = f"max_epsilon of {path}"
        whose = f" over all runs on {population.name}"
        self.budget = replace(budget, max_epsilon=largest, name=name, whose=whose)

    @classmethod
    def of(cls, plan: Plan) -> Self | None:
        """The account of a run, None if it names none. LedgerError as the class."""
        if plan.account is None:
            return None
        return cls(Path(plan.account), Population.of(plan), plan.budget())

    def join(self, own: DurableLedger, folder: RunFolder) -> None:
        """Begins to charge for a run: from now on every charge to its own ledger is charged here
        first. LedgerError: the account is older than the run's checkpoint, or lacks some of the
        run's spending."""
        # A run is identified by its first folder, and by the permanent identity of its ledger.
        identity = own.position().identity
        known = (run for run in self.ledger.data_owners(USER) if run.endswith(identity))
        self.run = next(known, f"{folder.path} {identity}")
        if folder.checkpoint_path.exists():
            position = folder.positions().get(ACCOUNT)
        else:
            position = None
        here = dict(self.ledger.spent(USER, data_owner=self.run).entries)
        lacking = [event for event, count in own.spent(USER).entries if here.get(event, 0) < count]
        if lacking or (position is not None and not self.ledger.contains(position)):
            lacks = (
                f" lacks the spending of the run in {folder.path}: it is an older copy "
                "or another account. Restore the account that the run has charged"
            )
            raise LedgerError(Wording(_key(self.path), lacks))
        own.account = self

    def require_room(self, charges: Sequence[Charge], what: str = "the next round") -> None:
        """Raises BudgetSpent if these charges, for `what`, would exceed the budget in the account's
        current state."""
        self.budget.require_room(self.ledger.total(), charges, what)

    def charge(self, charges: Sequence[Charge]) -> None:
        """Charges the account. BudgetSpent: the budget would be exceeded. Check and charge are one
        transaction."""
        mine = [
            replace(charge, data_owner=self.run) for charge in charges if charge.guarantee == USER
        ]
        self.require_room(mine)  # what takes time is computed before others have to wait
        self.ledger.charge(mine, allowed=lambda spent: self.budget.require_room(spent, mine))

    @property
    def runs(self) -> int:
        """The number of runs that have charged the account."""
        return len(self.ledger.data_owners(USER))

    def said(self) -> str:
        """The spending of all runs together, in one line."""
        budget = self.budget
        delta = self.population.delta
        count = self.runs
        return (
            f"user-level, all runs on {self.population.name}: epsilon "
            f"{budget.epsilon(self.ledger.total()):.4g} by {budget.accountant} at delta {delta:g} "
            f"({count} run{'s' * (count != 1)} in {self.path})"
        )

    def outlook(self, rounds: Sequence[Charge], beside: Sequence[Charge] = ()) -> Wording:
        """Describes the spending before a run, and how many of its rounds, one charge each, fit in
        the budget with other charges."""

        def full(count: int) -> bool:
            try:
                self.require_room([*beside, *rounds[:count]])
            except BudgetSpent:
                return True
            return False

        said = self.said()
        most = self.budget.max_epsilon
        planned = len(rounds)
        room = bisect_left(range(1, planned + 1), True, key=full)
        if most is None or room == planned:
            return Wording(said)
        room_for = f" has room for {room} of the {planned} rounds of this one"
        return Wording(f"{said}; ", Key(f"{self.budget.name}={most:g}"), room_for)

    def facts(self) -> dict[str, object]:
        """The account's current facts for privacy.json."""
        spent = self.ledger.total()
        chosen = self.budget.accountant
        delta = self.population.delta
        # which the PLD accountant does not support
        only = chosen == RDP and self.population.adjacency == ADJACENCIES[1]
        if only:
            names = [chosen]
        else:
            names = [chosen, *(each for each in ACCOUNTANTS if each != chosen)]
        return {
            "population": asdict(self.population),
            "runs": self.runs,
            "epsilon": {name: spent.epsilon(delta, name) for name in names},
            "epsilon_is": "of all runs that have charged the account so far, composed",
            "max_epsilon": self.budget.max_epsilon,
            "releases": spent.num_releases,
            "head": self.ledger.position().head,
        }


def _key(path: Path) -> Key:
    return Key(f"privacy.user.account={path}")


def _missing(path: Path, population: Population) -> Wording:
    """The message about a missing account."""
    made = f"discreet ledger create {path} --population {population.name!r}"
    made += f" --size {population.size} --delta {population.delta:g}"
    if population.adjacency == ADJACENCIES[1]:
        made += " --replace"
    advice = (
        " is missing: restore it, because it records what was spent. If this "
        f"population was never charged, create it: {made}"
    )
    return Wording(_key(path), advice)


def create_account(
    path: Path, population: Population, *, max_epsilon: float | None = None
) -> DurableLedger:
    """Creates the account of a population, with nothing spent. `max_epsilon`: a limit for every
    run, whatever its own budget is. LedgerError: the file exists already, or can't be made."""
    fits = max_epsilon is None or 0 < max_epsilon < math.inf
    require(fits, "max_epsilon of an account", "above 0 and finite", max_epsilon)
    return DurableLedger.create(path, facts={**asdict(population), LIMIT: max_epsilon})


def is_account(facts: Mapping[str, Any]) -> bool:
    """True if a ledger with these facts is the account of a population."""
    return facts.keys() == {*SETTINGS, LIMIT}
