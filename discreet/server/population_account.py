"""One account over all runs on the same people: what a population has spent, whoever spent it.

A run's own ledger says what the run has cost. If `privacy.user.account` names an account, each charge to that ledger is
charged to the account first, and `max_epsilon` holds over all that the account has: the epsilon of all runs together,
by composition of every event that any of them charged. Adjacency and unit are those of `privacy.user`.

An account is a `DurableLedger`: made once, chained, known to this machine. Its rows bear the run that charged them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from discreet.accounting.events import ACCOUNTANTS, RDP
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.budget import BudgetSpent, ServerBudget
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.ledger.rollback_guard import LedgerPosition
from discreet.server.plan import Plan
from discreet.server.run_folder import ACCOUNT, RunFolder
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError

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
    """Whose data an account is about, and what its epsilon means: neighbours differ by `adjacency`, at `delta`.

    Raises:
      ConfigError: a value is out of its range.
    """

    name: str
    size: int
    adjacency: str
    delta: float

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ConfigError("the name of a population must not be empty")
        if self.adjacency not in ADJACENCIES:
            raise ConfigError(f"the adjacency of a population must be one of {', '.join(ADJACENCIES)}")
        if self.size < 1 or not 0 < self.delta < 1 / self.size:
            raise ConfigError(
                f"a population must have at least 1 client, and delta must be within (0, 1 / {max(self.size, 1)}) "
                f"(got {self.size} clients, delta {self.delta:g})"
            )

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The population of a run that names one."""
        kind = ADJACENCIES[plan.run.user.sampling == "fixed"]
        return cls(str(plan.population), plan.run.user.population_size, kind, plan.run.delta)


class PopulationAccount:
    """The account of a population, as one run sees it.

    Args:
      path: the file.
      population: what the run takes the population to be.
      budget: of all runs together, unless the account was made with a smaller one.

    Raises:
      LedgerError: the account is missing, damaged, or of another population; the message names the setting.
    """

    def __init__(self, path: Path, population: Population, budget: ServerBudget) -> None:
        if not path.is_file():
            raise LedgerError(
                f"privacy.user.account={path} is missing: put it back, what was spent is not forgotten with it. If "
                f"this population was never charged, make it: {_command(path, population)}"
            )
        self.ledger, self.population = DurableLedger(path), population
        facts = self.ledger.facts()
        _check_population(path, population, facts)
        largest = min((each for each in (budget.max_epsilon, facts[LIMIT]) if each is not None), default=None)
        name = budget.name if largest == budget.max_epsilon else f"max_epsilon of {path}"
        whose = f" over all runs on {population.name}"
        self.budget = replace(budget, max_epsilon=largest, name=name, whose=whose)
        self.run = ""

    @classmethod
    def of(cls, plan: Plan) -> Self | None:
        """The account of a run, None if it names none.

        Raises:
          LedgerError: as the class.
        """
        return None if plan.account is None else cls(Path(plan.account), Population.of(plan), plan.budget())

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.ledger.path

    def check(self) -> None:
        """Raises LedgerError if the account is damaged, or this machine never charged it, or knows more of it."""
        self.ledger.check()

    def join(self, own: DurableLedger, folder: RunFolder) -> None:
        """Begins to charge for a run: what is charged to its own ledger from now on is charged here before.

        Raises:
          LedgerError: the account is older than the run's checkpoint, or lacks what the run has spent.
        """
        self.run = self._name_of(own, folder)
        position = folder.positions().get(ACCOUNT) if folder.checkpoint_path.exists() else None
        here = dict(self.ledger.spent(USER, data_owner=self.run).entries)
        lacking = [event for event, count in own.spent(USER).entries if here.get(event, 0) < count]
        if lacking or (position is not None and not self.ledger.contains(position)):
            raise LedgerError(
                f"privacy.user.account={self.path} lacks what the run in {folder.path} has spent: it is older than the "
                "run, or another account. Put back the one that the run has charged"
            )
        own.account = self

    def _name_of(self, own: DurableLedger, folder: RunFolder) -> str:
        """The name of a run in its rows: its first place on disk, and the identity of its ledger, which stays."""
        identity = own.position().identity
        known = (run for run in self.ledger.data_owners(USER) if run.endswith(identity))
        return next(known, f"{folder.path} {identity}")

    def require_room(self, charges: Sequence[Charge], what: str = "the next round") -> None:
        """Raises BudgetSpent if these charges, for `what`, would pass the budget as the account stands now."""
        self.budget.require_room(self.total(), charges, what)

    def charge(self, charges: Sequence[Charge]) -> None:
        """Charges the account, unless the budget would be passed: check and charge are one transaction.

        Raises:
          BudgetSpent: nothing is written.
          LedgerError: the account can't be charged.
        """
        mine = [replace(charge, data_owner=self.run) for charge in charges if charge.guarantee == USER]
        self.require_room(mine)  # what takes time is computed before others have to wait
        self.ledger.charge_if(lambda spent: self.budget.require_room(spent, mine), mine)

    def position(self) -> LedgerPosition:
        return self.ledger.position()

    def total(self) -> PrivacyLedger:
        """The spending of all runs together."""
        return self.ledger.total()

    def runs(self) -> list[str]:
        """The runs that have charged the account."""
        return self.ledger.data_owners(USER)

    def count(self) -> str:
        """The number of runs that have charged the account, in words."""
        number = len(self.runs())
        return f"{number} run{'' if number == 1 else 's'}"

    def said(self) -> str:
        """The spending of all runs together, in one line."""
        spent, budget, delta = self.budget.epsilon(self.total()), self.budget, self.population.delta
        return (
            f"user-level, all runs on {self.population.name}: epsilon {spent:.4g} by {budget.accountant} at "
            f"delta {delta:g} ({self.count()} in {self.path})"
        )

    def outlook(self, rounds: Sequence[Charge], beside: Sequence[Charge] = ()) -> str:
        """Says in one line what is spent before a run, and how many of its rounds, a charge each, fit into the budget
        with the charges `beside` them."""
        spent, most, planned = self.total(), self.budget.max_epsilon, len(rounds)
        said = f"account {self.path}: epsilon {self.budget.epsilon(spent):.4g} is spent by {self.count()}"
        room = bisect_left(range(1, planned + 1), True, key=lambda count: not self._fit([*beside, *rounds[:count]]))
        if most is None or room == planned:
            return said
        return f"{said}; {self.budget.name}={most:g} has room for {room} of the {planned} rounds of this one"

    def _fit(self, charges: Sequence[Charge]) -> bool:
        try:
            self.require_room(charges)
        except BudgetSpent:
            return False
        return True

    def facts(self) -> dict[str, object]:
        """The account's facts for privacy.json, as they stand now."""
        spent = self.total()
        chosen, delta = self.budget.accountant, self.population.delta
        only = chosen == RDP and self.population.adjacency == ADJACENCIES[1]  # which PLD does not know
        names = [chosen] if only else [chosen, *(each for each in ACCOUNTANTS if each != chosen)]
        return {
            "population": asdict(self.population),
            "runs": len(self.runs()),
            "epsilon": {name: spent.epsilon(delta, name) for name in names},
            "epsilon_is": "of all runs that have charged the account by now, composed",
            "max_epsilon": self.budget.max_epsilon,
            "releases": spent.num_releases,
            "head": self.position().head,
        }


def create_account(path: Path, population: Population, *, max_epsilon: float | None = None) -> DurableLedger:
    """Makes the account of a population, in which nothing is spent. `max_epsilon`: what no run may pass, whatever its
    own budget is.

    Raises:
      LedgerError: there is a file already, or none can be made.
    """
    if max_epsilon is not None and not max_epsilon > 0:
        raise ConfigError(f"max_epsilon of an account must be above 0 (got {max_epsilon})")
    return DurableLedger.create(path, facts={**asdict(population), LIMIT: max_epsilon})


def is_account(facts: Mapping[str, Any]) -> bool:
    """True if a ledger that was made with these facts is the account of a population."""
    return facts.keys() == {*SETTINGS, LIMIT}


def _check_population(path: Path, population: Population, facts: Mapping[str, Any]) -> None:
    if not is_account(facts):
        raise LedgerError(f"privacy.user.account={path} is the ledger of a run or of a node, not that of a population")
    for name, setting in SETTINGS.items():
        if facts[name] != getattr(population, name):
            raise LedgerError(
                f"{setting} does not fit privacy.user.account={path}: the population's {name} is {facts[name]} there, "
                f"and {getattr(population, name)} in this run"
            )


def _command(path: Path, population: Population) -> str:
    replaced = " --replace" if population.adjacency == ADJACENCIES[1] else ""
    return (
        f"discreet ledger create {path} --population {population.name!r} --size {population.size} "
        f"--delta {population.delta:g}{replaced}"
    )
