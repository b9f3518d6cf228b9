"""The trials of `discreet tune`: priced, drawn once, run, and the best of them published."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from discreet.ledger.durable_ledger import DurableLedger
from discreet.privacy.randomness import source_of
from discreet.privacy.selection import TrialCount
from discreet.queries.scores import main_score
from discreet.server.plan import Plan
from discreet.server.private_selection import (
    ACCOUNTANT,
    SelectionCost,
    cost_of,
    model_row,
    publish,
    require_room,
    require_whole,
)
from discreet.server.run_folder import OVER, RunFolder, replace_file, state_of
from discreet.settings.compose import parse_config
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from discreet.simulation.many_runs import Job

TUNE_FILE = "tune.json"  # holds the drawn trials, and with them their number, which is not to be published


@dataclass(frozen=True)
class Trial:
    """One run that was drawn: its folder, the number of its candidate, and its seed, which is None if it is secure."""

    folder: str
    candidate: int
    seed: int | None


@dataclass(frozen=True)
class Tune:
    """The choice as it was described and drawn, once, before the first trial."""

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
        """Raises ConfigError if the choice would cost too much."""
        if self.max_epsilon is not None and cost.selection > self.max_epsilon:
            raise ConfigError(
                f"the choice would cost epsilon {cost.selection:.4g}, above --max-epsilon {self.max_epsilon:g}"
            )


def read_tune(output: Path) -> Tune:
    """The tune that was begun in a folder.

    Raises:
      ConfigError: the folder holds no unfinished tune, or its file is damaged.
    """
    try:
        stored = json.loads((output / TUNE_FILE).read_text())
        return Tune(**{**stored, "trials": [Trial(**trial) for trial in stored["trials"]]})
    except FileNotFoundError as error:
        raise ConfigError(f"--output {output} holds no unfinished tune: leave out --resume to begin one") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{output / TUNE_FILE} is damaged: {error}") from error


def price(tune: Tune, plans: Sequence[Plan]) -> str:
    """The number of candidates and the price of the choice, in two lines.

    Raises:
      ConfigError: there is no choice, or it would cost too much.
    """
    if all(plan.asked == plans[0].asked for plan in plans):
        raise ConfigError(
            "there must be at least two different candidates (got 1), for choosing costs epsilon: a comma lists values "
            "to try; `discreet simulate` trains once"
        )
    if any(plan.run.data.normalise == "private" for plan in plans):
        raise ConfigError("data.normalise must be none or public with discreet tune, whose price is that of rounds")
    cost = cost_of(plans, tune.count)
    tune.check_budget(cost)
    return (
        f"{len(plans)} candidates; a {tune.distribution} number of trials, {tune.mean:g} on average\n"
        f"epsilon {cost.one_trial:.4g} for one trial, {cost.selection:.4g} for the best (rdp, delta {cost.delta:g})"
    )


def drawn(tune: Tune, plans: Sequence[Plan], output: Path) -> Tune:
    """The tune with its trials, each one of the candidates, uniformly; they are stored.

    Raises:
      ConfigError: the folder holds something.
    """
    if output.exists() and any(output.iterdir()):
        unfinished = (output / TUNE_FILE).exists()
        hint = ": it holds a tune that was not finished, --resume goes on with it" if unfinished else ""
        raise ConfigError(f"--output {output} is not empty{hint}")
    source, trials = source_of(plans[0].seed).child("tune"), []
    choices = source.child("choices")
    for _ in range(tune.count.draw(source.child("count"))):
        candidate = int(choices.uniform(1)[0] * len(plans))
        # Reproducible as a whole, but no trial repeats another.
        seed = None if plans[candidate].seed is None else int(choices.words(1)[0] >> 33)
        # A number in the name would tell how many trials came before.
        trials.append(Trial(secrets.token_hex(8), candidate, seed))
    tune = replace(tune, trials=trials)
    output.mkdir(parents=True, exist_ok=True)
    replace_file(output / TUNE_FILE, (json.dumps(asdict(tune), indent=2) + "\n").encode())
    return tune


def trial_jobs(tune: Tune, plans: Sequence[Plan], folder: Path) -> list[Job]:
    """A run for each trial, in a folder below `folder`.

    Raises:
      ConfigError: the population's account has no room for those that have not begun.
    """
    require_room([plans[trial.candidate] for trial in tune.trials if not (folder / trial.folder).exists()])
    jobs = []
    for number, trial in enumerate(tune.trials, start=1):
        files, plan = RunFolder(folder / trial.folder), plans[trial.candidate]
        asked = {**plan.asked, "seed": trial.seed, "output_dir": str(files.path)}
        jobs.append(Job(f"trial {number} of {len(tune.trials)}", files, plan, partial(_run_trial, asked, files)))
    folder.mkdir(exist_ok=True)
    return jobs


def _run_trial(asked: dict[str, Any], files: RunFolder) -> None:
    """Runs the settings that are asked for. A trial that was interrupted goes on after its last whole round: its ledger
    has what it did before."""
    if state_of(files) in OVER:
        return
    if (files.path / "config.yaml").exists():
        simulate(replace(files.read_config(), output_dir=str(files.path), resume=True))
        return
    if files.path.exists():
        shutil.rmtree(files.path)  # ended before its first round: nothing was released
    simulate(parse_config(asked))


def publish_best(tune: Tune, plans: Sequence[Plan], trials: Sequence[RunFolder], output: Path) -> str:
    """Publishes the best trial, deletes the others, and says where it is and what the choice cost, in two lines.

    Raises:
      ConfigError: the account of the population ended a trial, or repeated rounds made the choice cost too much.
    """
    require_whole(trials)
    repeated = max(DurableLedger(f.ledger_path).spent(USER).num_releases - f.read_config().rounds for f in trials)
    cost = cost_of(plans, tune.count, repeated=max(0, repeated))
    tune.check_budget(cost)
    chosen = publish(max((files.path for files in trials), key=score), output, trials=tune.count, cost=cost)
    shutil.rmtree(output / "trials")
    (output / TUNE_FILE).unlink()
    return (
        f"chosen run: {chosen}\n"
        f"epsilon {cost.selection:.4g} with the choice ({ACCOUNTANT}, delta {cost.delta:g}), in every file of it"
    )


def score(folder: Path) -> float:
    """Accuracy or R2 of a trial's model, which is not the last one if the trial was lost; -inf of an untrained one."""
    privacy = json.loads((folder / "privacy.json").read_text())
    row = model_row(privacy, RunFolder(folder).read_metrics())
    value = row.get(main_score(row))
    return -math.inf if value is None or math.isnan(value) else value
