"""Private selection: the best of a random number of trials, the cost of that choice, and the chosen run, each file of
which states the cost of the choice and not that of a trial."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.events import RDP
from discreet.ledger.budget import BudgetSpent
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.mechanisms.mechanism import releases_of, terms_of
from discreet.mechanisms.mechanism_table import server_mechanism
from discreet.privacy.selection import TrialCount, selection_event
from discreet.server.plan import Plan, plan_of
from discreet.server.population_account import PopulationAccount
from discreet.server.privacy_statement import privacy_facts
from discreet.server.run_folder import RunFolder, read_tensors, write_json, write_tensors
from discreet.server.state import Outcome
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SELECTION_FILE = "selection.json"
ACCOUNTANT = RDP  # the only one that knows the choice among trials


@dataclass(frozen=True)
class SelectionCost:
    """Epsilons at `delta` by RDP: of one trial of the dearest candidate, and of the whole choice, which is `event`."""

    delta: float
    one_trial: float
    selection: float
    event: DpEvent


def model_row(
    privacy: Mapping[str, Any] | None, rows: Sequence[Mapping[str, float | None]]
) -> Mapping[str, float | None]:
    """The row of metrics.csv for the round that a run's model is of: the last row, unless the run was lost; empty if
    the model is the untrained one. `privacy` is privacy.json, or None while the run goes on."""
    number = (privacy or {}).get("model_round", rows[-1]["round"] if rows else 0)
    return next((row for row in rows if row["round"] == number), {})


def cost_of(plans: Sequence[Plan], trials: TrialCount, *, repeated: int = 0) -> SelectionCost:
    """The cost of a choice among trials of these plans, each trial with all of its rounds. `repeated`: the most rounds
    that a trial did a second time because it was interrupted.

    Raises:
      ConfigError: a plan gives a guarantee other than the user-level one, none at all, or no noise; their
        deltas differ; or none of them costs most at every Renyi order.
    """
    for plan in plans:
        mechanisms = plan.mechanisms
        if USER not in mechanisms or terms_of(mechanisms[USER]).noise_multiplier == 0:
            raise ConfigError("privacy.user is off or without noise: there is nothing for discreet tune to account")
        if len(mechanisms) > 1:
            raise ConfigError(
                "privacy.example and privacy.local must be off: every update of every trial reaches the server, so the "
                "trials add up there. Try settings with discreet simulate --multirun; discreet report states the sum"
            )
        if plan.output is not None or plan.resume:
            raise ConfigError("output_dir and resume are chosen by discreet tune: give --output")
    deltas = {plan.run.delta for plan in plans}
    if len(deltas) > 1:
        raise ConfigError("privacy.delta must be the same for every candidate")
    delta, spent = deltas.pop(), list({_planned(plan, repeated) for plan in plans})
    one = max(epsilon_spent(entries, delta=delta, accountant=ACCOUNTANT) for entries in spent)
    try:
        event = selection_event(spent, trials=trials)
        return SelectionCost(delta, one, epsilon_spent([(event, 1)], delta=delta, accountant=ACCOUNTANT), event)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def require_room(trials: Sequence[Plan]) -> None:
    """Raises ConfigError unless the population's account, if trials charge one, has room for all rounds of all of them:
    a trial that others before it end early is not the one whose repetitions Papernot and Steinke price."""
    if len({plan.account for plan in trials}) > 1:
        raise ConfigError("privacy.user.account must be the same for every candidate")
    charges = [Charge(0, USER, "", event, count) for plan in trials for event, count in _planned(plan, 0)]
    for account in map(PopulationAccount.of, trials):
        try:
            if account is not None:
                account.require_room(charges)
        except BudgetSpent as error:
            raise ConfigError(
                f"privacy.user.account has no room for all trials that were drawn: with all of them {error}"
            ) from error


def require_whole(trials: Sequence[RunFolder]) -> None:
    """Raises ConfigError if a trial was ended by the population's account: then none may be published."""
    for files in trials:
        said = json.loads((files.path / "privacy.json").read_text())
        ended = said["stopped"] is not None and said["model_round"] == said["rounds"]  # and did not run away
        if ended and files.read_config().privacy.user.account is not None:
            raise ConfigError(
                "privacy.user.account has no room for all trials, and one ended early: nothing is published. What they "
                "have spent is charged there"
            )


def _planned(plan: Plan, repeated: int) -> tuple[tuple[DpEvent, int], ...]:
    mechanism = server_mechanism(plan.run)
    assert mechanism is not None
    noise_multiplier = terms_of(mechanism).noise_multiplier
    assert noise_multiplier is not None
    planned = releases_of(mechanism, noise_multiplier, plan.run.rounds)
    # A round that was done again may have been one of the dearest kind, whose cohort also rates the model.
    rates = plan.run.evaluation.private and plan.run.evaluation.cohort == "same"
    again = mechanism.event(noise_multiplier, rates=rates)
    return tuple((event, count) for event, count in (*planned, (again, repeated)) if count)


def publish(chosen: Path, output: Path, *, trials: TrialCount, cost: SelectionCost) -> Path:
    """Copies the chosen run to OUTPUT/chosen, where every file states what the choice has cost."""
    path, unfinished = output / "chosen", output / "unfinished"
    facts: Mapping[str, object] = {
        "distribution": trials.distribution,
        "mean": trials.mean,
        "delta": cost.delta,
        "epsilon_of_one_trial": cost.one_trial,
        "epsilon": cost.selection,
        "accountant": ACCOUNTANT,
        "covers": "the chosen run and that it was chosen",
        "not_covered": ["the number of trials", "the other trials", "how long they took"],
    }
    if not path.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(chosen, unfinished)
        _state_choice(RunFolder(unfinished), cost, facts, named=path)
        unfinished.rename(path)
    DurableLedger(RunFolder(path).ledger_path).adopt()  # it was moved
    return path


def _state_choice(files: RunFolder, cost: SelectionCost, facts: Mapping[str, object], *, named: Path) -> None:
    """Rewrites a copy of a trial's folder, which will be called `named`, as the run that was chosen. The ledger holds
    one row, the choice. Every round of metrics.csv costs as much as the last one: whichever is released, it was chosen
    by what came after the last one. ConfigError: the trial has not done a round."""
    config, checkpoint = files.read_config(), files.load_checkpoint()
    if checkpoint is None:
        raise ConfigError(f"{files.path} holds no round: there is nothing to publish")
    config = replace(config, output_dir=str(named), privacy=replace(config.privacy, accountant=ACCOUNTANT))
    for path in files.path.glob(f"{files.ledger_path.name}*"):
        path.unlink()
    plan = plan_of(config)
    ledger = DurableLedger.create(files.ledger_path, facts=plan.deciding)
    ledger.charge([Charge(checkpoint.round, USER, "", cost.event)])
    files.save_checkpoint(checkpoint)
    if (best := files.load_checkpoint(best=True)) is not None:
        files.save_checkpoint(best, best=True)
    files.replace_metrics([{**row, "epsilon_user": cost.selection} for row in files.read_metrics()])
    files.write_config(plan.written)
    before = json.loads((files.path / "privacy.json").read_text())
    lost = best if before.get("model_round", checkpoint.round) != checkpoint.round else None
    outcome = Outcome(checkpoint, before["stopped"], lost)
    # This ledger has no account of the population: its total would tell the number of trials.
    write_json(files.path / "privacy.json", {**privacy_facts(plan, ledger, outcome), "selection": facts})
    model = files.path / "model.safetensors"
    tensors, metadata = read_tensors(model)
    write_tensors(model, tensors, {**metadata, "selection": json.dumps(facts)})
    write_json(files.path / SELECTION_FILE, facts)
