"""Tuning by private selection: trials are priced, drawn once and run, and the best is published.
Every file of the chosen run states the cost of the selection among a random number of trials, not
that of one trial."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.events import RDP
from discreet.ledger.budget import BudgetSpent
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.mechanisms.mechanism import releases_of
from discreet.planning.plan import Plan
from discreet.planning.state import Outcome
from discreet.privacy.randomness import source_of
from discreet.privacy.selection import TrialCount, selection_event
from discreet.reporting.records import SELECTION, model_row
from discreet.run_files.metrics_table import main_score
from discreet.run_files.run_folder import RunFolder, read_tensors, write_tensors
from discreet.run_files.whole_files import new_folder, replace_file, write_json
from discreet.server.population_account import PopulationAccount
from discreet.server.run_context import privacy_facts
from discreet.settings.adjacency import USER
from discreet.settings.rules import ConfigError
from discreet.simulation.many_runs import Job, go_on

if TYPE_CHECKING:
    from dp_accounting import DpEvent

CHOSEN = "chosen"  # the published run, in the output folder
# It lists the drawn trials, whose number must not be published.
TUNE_FILE = "tune.json"
TRIALS = "trials"  # their folder, until the chosen one is published
NOTHING: Mapping[Any, int] = {}
ACCOUNTANT = RDP  # the only accountant that supports private selection


class SelectionCost(NamedTuple):
    """Epsilons at `delta` by RDP: of one trial of the most expensive candidate, and of the whole
    selection, `event`."""

    delta: float
    one_trial: float
    selection: float
    event: DpEvent


@dataclass(frozen=True)
class Trial:
    """A drawn run: its folder, the number of its candidate, and its seed, None for secure
    randomness."""

    folder: str
    candidate: int
    seed: int | None


@dataclass(frozen=True)
class Tune:
    """The selection as described and drawn, once, before the first trial."""

    overrides: list[str]
    distribution: str
    mean: float
    max_epsilon: float | None
    trials: list[Trial]

    @property
    def count(self) -> TrialCount:
        """The distribution of the number of trials."""
        return TrialCount(self.distribution, self.mean)

    def check_budget(self, cost: SelectionCost) -> None:
        """Raises ConfigError if the selection would exceed the budget."""
        if self.max_epsilon is not None and cost.selection > self.max_epsilon:
            raise ConfigError(
                f"the choice would cost epsilon {cost.selection:.4g}, above --max-epsilon "
                f"{self.max_epsilon:g}"
            )


def read_tune(output: Path) -> Tune:
    """The tune that was begun in a folder. Raises ConfigError: there is no unfinished one, or its
    file is damaged."""
    try:
        stored = json.loads((output / TUNE_FILE).read_text())
        return Tune(**{**stored, "trials": [Trial(**trial) for trial in stored["trials"]]})
    except FileNotFoundError as error:
        raise ConfigError(
            f"--output {output} holds no unfinished tune: leave out --resume to begin one"
        ) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{output / TUNE_FILE} is damaged: {error}") from error


def price(tune: Tune, plans: Sequence[Plan]) -> str:
    """The number of candidates and the price of the selection, in two lines. Raises ConfigError:
    there is nothing to select, or the price exceeds the budget."""
    if all(plan.asked == plans[0].asked for plan in plans):
        raise ConfigError(
            "there must be at least two different candidates (got 1), for choosing costs "
            "epsilon: a comma lists values to try; `discreet simulate` trains once"
        )
    if any(plan.run.data.normalise == "private" for plan in plans):
        raise ConfigError(
            "data.normalise must be none or public with discreet tune, whose price is that of "
            "rounds"
        )
    cost = cost_of(plans, tune.count)
    tune.check_budget(cost)
    return (
        f"{len(plans)} candidates; a {tune.distribution} number of trials, {tune.mean:g} on "
        f"average\nepsilon {cost.one_trial:.4g} for one trial, {cost.selection:.4g} for the best "
        f"(rdp, delta {cost.delta:g})"
    )


def drawn(tune: Tune, plans: Sequence[Plan], output: Path) -> Tune:
    """The tune with its trials, each a uniformly drawn candidate; it is stored. Raises ConfigError:
    the folder is not empty."""
    left = f".{TUNE_FILE}."  # by a tune that was killed before it began
    if output.exists() and not all(each.name.startswith(left) for each in output.iterdir()):
        unfinished = (output / TUNE_FILE).exists()
        if unfinished:
            hint = ": it holds a tune that was not finished, --resume continues it"
        else:
            hint = ""
        raise ConfigError(f"--output {output} is not empty{hint}")
    source = source_of(plans[0].settings.seed).child("tune")
    trials = []
    choices = source.child("choices")
    for _ in range(tune.count.draw(source.child("count"))):
        candidate = int(choices.uniform(1)[0] * len(plans))
        # The tune is reproducible as a whole, but no trial repeats another.
        if plans[candidate].settings.seed is None:
            seed = None
        else:
            seed = int(choices.words(1)[0] >> 33)
        # A number in the name would reveal the number of earlier trials.
        trials.append(Trial(secrets.token_hex(8), candidate, seed))
    tune = replace(tune, trials=trials)
    output.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = json.dumps(asdict(tune), indent=2) + "\n"
    replace_file(output / TUNE_FILE, content.encode(), mode=0o600)
    return tune


def trial_jobs(
    tune: Tune, plans: Sequence[Plan], devices: Sequence[str], folder: Path
) -> list[Job]:
    """A job for each trial, in a folder below `folder`; each candidate has its plan and device.
    Raises ConfigError: an account has no room for the remaining trials."""
    folder.mkdir(mode=0o700, exist_ok=True)  # nobody else may count them
    require_room(
        [plans[trial.candidate] for trial in tune.trials if not (folder / trial.folder).exists()]
    )
    jobs = []
    for number, trial in enumerate(tune.trials, start=1):
        files = RunFolder(folder / trial.folder)
        plan = plans[trial.candidate]
        name = f"trial {number} of {len(tune.trials)}"
        asked = replace(plan.as_asked, seed=trial.seed)
        device = devices[trial.candidate]
        work = partial(go_on, files, name, asked, device=device)
        jobs.append(Job(name, files, plan, work, device))
    folder.mkdir(exist_ok=True)
    return jobs


def publish_best(
    tune: Tune, plans: Sequence[Plan], trials: Sequence[RunFolder], output: Path
) -> str:
    """Publishes the best trial as OUTPUT/chosen, deletes the others, and returns two lines with its
    place and the cost of the selection. Raises ConfigError: the population's account ended a trial,
    or repetitions made the selection exceed the budget."""
    require_whole(trials)
    repeated = Counter[Any]()
    for trial, files in zip(tune.trials, trials, strict=True):
        repeated |= repetitions(plans[trial.candidate], files)
    cost = cost_of(plans, tune.count, repeated=repeated)
    tune.check_budget(cost)
    with new_folder(output / CHOSEN) as made:
        best = max((files.path for files in trials), key=score)
        shutil.copytree(best, made, dirs_exist_ok=True)
        _state_choice(RunFolder(made), tune, cost)
    return finished(output)


def finished(output: Path) -> str:
    """Deletes the trials of a tune whose chosen run is published, and returns the two lines about
    it. After a kill it is called again, and no trial is done anew."""
    chosen = RunFolder(output / CHOSEN)
    DurableLedger(chosen.ledger_path).adopt()  # it was moved
    if (output / TRIALS).exists():
        shutil.rmtree(output / TRIALS)
    (output / TUNE_FILE).unlink(missing_ok=True)
    facts = json.loads((chosen.path / SELECTION).read_text())
    return (
        f"chosen run: {chosen.path}\nepsilon {facts['epsilon']:.4g} with the choice "
        f"({ACCOUNTANT}, delta {facts['delta']:g}), in every file of it"
    )


def _state_choice(files: RunFolder, tune: Tune, cost: SelectionCost) -> None:
    """Rewrites a copy of a trial's folder as the chosen run. Its ledger holds one row, the
    selection. Every round in metrics.csv has the cost of the whole selection, because the trial was
    chosen by the result after the last round, whichever round is released. Raises ConfigError: the
    trial has not done a round."""
    config, call = files.read_asked()
    checkpoint = files.load_checkpoint()
    if checkpoint is None:
        raise ConfigError(f"{files.path} holds no round: there is nothing to publish")
    facts: Mapping[str, object] = {
        "distribution": tune.distribution,
        "mean": tune.mean,
        "delta": cost.delta,
        "epsilon_of_one_trial": cost.one_trial,
        "epsilon": cost.selection,
        "accountant": ACCOUNTANT,
        "covers": "the chosen run and that it was chosen",
        "not_covered": ["the number of trials", "the other trials", "how long they took"],
    }
    config = replace(config, privacy=replace(config.privacy, accountant=ACCOUNTANT))
    for path in files.path.glob(f"{files.ledger_path.name}*"):
        path.unlink()
    plan = Plan(config)
    ledger = DurableLedger.create(files.ledger_path, facts=plan.deciding)
    ledger.charge([Charge(checkpoint.round, USER, "", cost.event)])
    files.save_checkpoint(checkpoint)
    if (best := files.load_checkpoint(best=True)) is not None:
        files.save_checkpoint(best, best=True)
    files.replace_metrics([{**row, "epsilon_user": cost.selection} for row in files.read_metrics()])
    files.write_config(config, device=call.device)
    before = json.loads((files.path / "privacy.json").read_text())
    if before.get("model_round", checkpoint.round) != checkpoint.round:
        lost = best
    else:
        lost = None
    outcome = Outcome(checkpoint, before["stopped"], lost)
    # This ledger names no account of the population, whose total would reveal the number of trials.
    write_json(
        files.path / "privacy.json", {**privacy_facts(plan, ledger, outcome), "selection": facts}
    )
    model = files.path / "model.safetensors"
    tensors, metadata = read_tensors(model)
    write_tensors(model, tensors, {**metadata, "selection": json.dumps(facts)})
    write_json(files.path / SELECTION, facts)


def cost_of(
    plans: Sequence[Plan], trials: TrialCount, *, repeated: Mapping[Any, int] = NOTHING
) -> SelectionCost:
    """The cost of a selection among trials of these plans, each trial with all of its rounds and
    ratings, and with what is `repeated`, of each event as often as in any trial. Raises
    ConfigError: a plan has another guarantee than the user-level one, none at all, or no noise;
    their deltas differ; or none of them costs most at every Renyi order."""
    for plan in plans:
        mechanisms = plan.mechanisms
        if not plan.noised(USER):
            raise ConfigError(
                "privacy.user is off or without noise: there is nothing for discreet tune to "
                "account"
            )
        if len(mechanisms) > 1:
            raise ConfigError(
                "privacy.example and privacy.local must be off: every update of every trial "
                "reaches the server, so the trials add up there. Try settings with discreet "
                "simulate --multirun; discreet report states the sum"
            )
    deltas = {plan.run.delta for plan in plans}
    if len(deltas) > 1:
        raise ConfigError("privacy.delta must be the same for every candidate")
    delta = deltas.pop()
    whole = (planned_releases(plan) + Counter(repeated) for plan in plans)
    spent = list({tuple(releases.items()) for releases in whole})
    one = max(epsilon_spent(entries, delta=delta, accountant=ACCOUNTANT) for entries in spent)
    try:
        event = selection_event(spent, trials=trials)
        return SelectionCost(
            delta, one, epsilon_spent([(event, 1)], delta=delta, accountant=ACCOUNTANT), event
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def require_room(trials: Sequence[Plan]) -> None:
    """Raises ConfigError unless the population's account, if trials charge one, has room for all
    rounds of all trials. A trial that earlier trials cut short is not a repetition as in Papernot
    and Steinke, whose price would not apply."""
    if len({plan.account for plan in trials}) > 1:
        raise ConfigError("privacy.user.account must be the same for every candidate")
    charges = [
        Charge(0, USER, "", event, count)
        for plan in trials
        for event, count in planned_releases(plan).items()
    ]
    for account in map(PopulationAccount.of, trials):
        try:
            if account is not None:
                account.require_room(charges)
        except BudgetSpent as error:
            raise ConfigError(
                "privacy.user.account has no room for all trials that were drawn: with all of "
                f"them {error}"
            ) from error


def require_whole(trials: Sequence[RunFolder]) -> None:
    """Raises ConfigError if the population's account ended a trial early: then none may be
    published."""
    for files in trials:
        said = json.loads((files.path / "privacy.json").read_text())
        # and training did not diverge
        ended = said["stopped"] is not None and said["model_round"] == said["rounds"]
        if ended and files.read_config().privacy.user.account is not None:
            raise ConfigError(
                "privacy.user.account has no room for all trials, and one ended early: nothing "
                "is published. What they have spent is charged there"
            )


def planned_releases(plan: Plan) -> Counter[Any]:
    """The events of all rounds and ratings of a plan, with their numbers."""
    return Counter(dict(releases_of(plan.mechanism, plan.run, plan.run.rounds)))


def repetitions(plan: Plan, files: RunFolder) -> Counter[Any]:
    """The events that a trial was charged beyond its plan, as an interrupted run repeats rounds
    and ratings. A trial that ended early has some that were planned: not in place of others, which
    may cost more."""
    charged = Counter(dict(DurableLedger(files.ledger_path).spent(USER).entries))
    return charged - planned_releases(plan)


def score(folder: Path) -> float:
    """Accuracy or R2 of a trial's model, which is not the last one if training diverged; -inf for
    an untrained model."""
    privacy = json.loads((folder / "privacy.json").read_text())
    row = model_row(privacy, RunFolder(folder).read_metrics())
    value = row.get(main_score(row))
    if value is None or math.isnan(value):
        return -math.inf
    return value
