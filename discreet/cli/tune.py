"""Tries settings and keeps the best run, and accounts for the cost of choosing it.

A comma lists the values to try. Each trial draws one value of each list, uniformly, and trains. The number of trials
is drawn before the first one, from --trials with mean --mean (Papernot and Steinke 2022). The run with the best
accuracy (of regression: R2) on the public test set is moved to OUTPUT/chosen; the others are deleted, because the
guarantee is for somebody who sees the chosen run alone. For the same reason keep the number of trials to yourself.
Every file of the chosen run states the cost of the choice, not that of a trial.

The trials are drawn once, and stored before the first one starts: if a tune was ended early, --resume goes on with the
same trials. A tune that is never resumed has spent what the ledgers of its trials say: add them up.

examples:
  discreet tune rounds=20 privacy.user.clip.norm=0.1,0.3,1 --output outputs/tuned
  discreet tune privacy.user.clip.norm=0.1,0.3 training.learning_rate=0.1,0.3 --mean 20 --cost
  discreet tune --resume --output outputs/tuned --jobs 4
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from discreet.cli.sweep import composed
from discreet.deployment.interruption import ending, interrupt_below, not_begun
from discreet.federated.chosen_trial import (
    ACCOUNTANT,
    SelectionCost,
    cost_of,
    model_row,
    publish,
    require_room,
    require_whole,
)
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.guarantees import USER
from discreet.federated.run_folder import OVER, RunFolder, replace_file, state_of
from discreet.logs import log_to
from discreet.privacy.randomness import source_of
from discreet.privacy.selection import TrialCount
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig
from discreet.simulation.in_process import simulate
from discreet.simulation.job import Job
from discreet.simulation.many_runs import check_parallel, run_all
from discreet.tasks.scores import main_score

MOST_CANDIDATES = 200
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


def command(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="SETTING=VALUE,VALUE ...")] = None,
    trials: Annotated[
        Literal["logarithmic", "geometric", "poisson"], Option(help="the distribution of the number of trials")
    ] = "logarithmic",
    mean: Annotated[float, Option(help="the mean number of trials")] = 10.0,
    max_epsilon: Annotated[float | None, Option(help="refuse to start if the choice would cost more")] = None,
    output: Annotated[Path | None, Option(help="the folder of the chosen run (outputs/tune_TIME)")] = None,
    keep_trials: Annotated[
        bool, Option("--keep-trials", help="keep the runs that were not chosen: never publish them")
    ] = False,
    cost: Annotated[bool, Option("--cost", help="only print what the choice would cost")] = False,
    resume: Annotated[bool, Option("--resume", help="go on with the trials that were drawn in --output")] = False,
    jobs: Annotated[int, Option(metavar="N", min=1, help="trials at a time, as tasks of a Ray cluster")] = 1,
) -> int:
    """Tunes; 1 if trials failed."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    log_to(sys.stdout)
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    folder = (output or Path(f"outputs/tune_{stamp}")).expanduser().resolve()
    with ending(not_begun):
        if resume:
            if overrides or output is None:
                raise ConfigError("--resume needs --output, the folder of the tune to go on with, and no settings")
            tune = read_tune(folder)
        else:
            tune = Tune(overrides or [], trials, mean, max_epsilon, [])
            configs = _priced(tune)
            if cost:
                return 0
            tune = _begin(tune, configs, folder)
        return _run(tune, folder, at_a_time=jobs, keep_trials=keep_trials)


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


def candidates_of(overrides: Sequence[str]) -> list[RunConfig]:
    """The settings of every combination of the listed values.

    Raises:
      ConfigError: a setting is wrong, or there are too many combinations.
    """
    candidates = composed(overrides)[0].runs
    if len(candidates) > MOST_CANDIDATES:
        raise ConfigError(f"more than {MOST_CANDIDATES} combinations of settings: list fewer values")
    return [load_config(words, of_sweep=True) for words in candidates]


def _priced(tune: Tune) -> list[RunConfig]:
    """The candidates, after their number and the price of the choice were printed.

    Raises:
      ConfigError: there is no choice, or it would cost too much.
    """
    if not tune.overrides:
        raise ConfigError("there is nothing to try: give settings; a comma lists values (see --help)")
    trials, configs = TrialCount(tune.distribution, tune.mean), candidates_of(tune.overrides)
    if all(config == configs[0] for config in configs):
        raise ConfigError(
            "there must be at least two different candidates (got 1), for choosing costs epsilon: a comma lists values "
            "to try; `discreet simulate` trains once"
        )
    if any(config.data.normalise == "private" for config in configs):
        raise ConfigError("data.normalise must be none or public with discreet tune, whose price is that of rounds")
    cost = cost_of(configs, trials)
    print(f"{len(configs)} candidates; a {trials.distribution} number of trials, {trials.mean:g} on average")
    print(f"epsilon {cost.one_trial:.4g} for one trial, {cost.selection:.4g} for the best (rdp, delta {cost.delta:g})")
    _check_budget(cost, tune.max_epsilon)
    return configs


def _check_budget(cost: SelectionCost, max_epsilon: float | None) -> None:
    if max_epsilon is not None and cost.selection > max_epsilon:
        raise ConfigError(f"the choice would cost epsilon {cost.selection:.4g}, above --max-epsilon {max_epsilon:g}")


def _begin(tune: Tune, configs: Sequence[RunConfig], output: Path) -> Tune:
    """Draws the trials, each one of the candidates, uniformly, and stores them.

    Raises:
      ConfigError: the folder holds something.
    """
    if output.exists() and any(output.iterdir()):
        unfinished = (output / TUNE_FILE).exists()
        hint = ": it holds a tune that was not finished, --resume goes on with it" if unfinished else ""
        raise ConfigError(f"--output {output} is not empty{hint}")
    source, trials = source_of(configs[0].seed).child("tune"), []
    choices = source.child("choices")
    for _ in range(TrialCount(tune.distribution, tune.mean).draw(source.child("count"))):
        candidate = int(choices.uniform(1)[0] * len(configs))
        # Reproducible as a whole, but no trial repeats another.
        seed = None if configs[candidate].seed is None else int(choices.words(1)[0] >> 33)
        # A number in the name would tell how many trials came before.
        trials.append(Trial(secrets.token_hex(8), candidate, seed))
    tune = replace(tune, trials=trials)
    output.mkdir(parents=True, exist_ok=True)
    replace_file(output / TUNE_FILE, (json.dumps(asdict(tune), indent=2) + "\n").encode())
    return tune


def _run(tune: Tune, output: Path, *, at_a_time: int, keep_trials: bool) -> int:
    """Runs the trials that have not been run, and publishes the best one; 1 if some failed.

    A trial that was interrupted goes on after its last whole round: its ledger has what it did before.
    """
    count, folder, configs = TrialCount(tune.distribution, tune.mean), output / "trials", candidates_of(tune.overrides)
    if at_a_time > 1:
        check_parallel(configs)
    require_room([configs[trial.candidate] for trial in tune.trials if not (folder / trial.folder).exists()])
    jobs = []
    for number, trial in enumerate(tune.trials, start=1):
        files = RunFolder(folder / trial.folder)
        config = replace(configs[trial.candidate], seed=trial.seed, output_dir=str(files.path))
        jobs.append(Job(f"trial {number} of {len(tune.trials)}", files, config, partial(_run_trial, config, files)))
    go_on = f"discreet tune --resume --output {shlex.quote(str(output))}" + (at_a_time > 1) * f" --jobs {at_a_time}"
    folder.mkdir(exist_ok=True)
    with ending(partial(interrupt_below, folder, f"nothing was chosen; to go on: {go_on}")):
        tally = run_all(jobs, at_a_time=at_a_time, shared=folder)
    if tally.failed:
        tally.tell_failures(f"{go_on}; until then nothing is chosen")
        return 1
    if not jobs:
        print("no trial was drawn: there is nothing to publish")
        return 0
    require_whole([job.folder for job in jobs])
    cost = cost_of(configs, count, repeated=max(0, *(_repeated_rounds(job.folder) for job in jobs)))
    _check_budget(cost, tune.max_epsilon)
    chosen = max((job.folder.path for job in jobs), key=score)
    print(f"chosen run: {publish(chosen, output, trials=count, cost=cost)}")
    print(f"epsilon {cost.selection:.4g} with the choice ({ACCOUNTANT}, delta {cost.delta:g}), in every file of it")
    if not keep_trials:
        shutil.rmtree(folder)
        (output / TUNE_FILE).unlink()
    return 0


def _run_trial(config: RunConfig, files: RunFolder) -> None:
    if state_of(files) in OVER:
        return
    if (files.path / "config.yaml").exists():
        simulate(replace(files.read_config(), output_dir=str(files.path), resume=True))
        return
    if files.path.exists():
        shutil.rmtree(files.path)  # ended before its first round: nothing was released
    simulate(config)


def _repeated_rounds(files: RunFolder) -> int:
    """The rounds that a trial has paid for beyond those it planned."""
    return DurableLedger(files.ledger_path).spent(USER).num_releases - files.read_config().rounds


def score(folder: Path) -> float:
    """Accuracy or R2 of a trial's model, which is not the last one if the trial was lost; -inf of an untrained one."""
    privacy = json.loads((folder / "privacy.json").read_text())
    row = model_row(privacy, RunFolder(folder).read_metrics())
    value = row.get(main_score(row))
    return -math.inf if value is None or math.isnan(value) else value
