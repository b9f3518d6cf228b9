"""Tries settings and keeps the best run, and accounts for the cost of choosing it.

A comma lists the values to try. Each trial draws one value of each list, uniformly, and trains. The number of trials
is drawn before the first one, from --trials with mean --mean (Papernot and Steinke 2022). The run with the best
accuracy (of regression: R2) on the public test set is moved to OUTPUT/chosen; the others are deleted, because the
guarantee is for somebody who sees the chosen run alone. For the same reason keep the number of trials to yourself.
Every file of the chosen run states the cost of the choice, not that of a trial.

The trials are drawn once, and stored before the first one starts: if a tune was ended early, --resume goes on with the
same trials. A tune that is never resumed has spent what the ledgers of its trials say: add them up.
"""

from __future__ import annotations

import argparse
import itertools
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

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from discreet.config import ConfigError, RunConfig, load_config
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
from discreet.federated.durable_ledger import DurableLedger, LedgerError
from discreet.federated.guarantees import USER
from discreet.federated.run_folder import OVER, RunFolder, replace_file, state_of
from discreet.logs import log_to
from discreet.privacy.randomness import RandomSource, source_of
from discreet.privacy.selection import SHAPES, TrialCount
from discreet.simulation.in_process import simulate
from discreet.simulation.job import Job
from discreet.simulation.many_runs import Tally, check_parallel, number_of_jobs, run_all
from discreet.tasks.scores import main_score

EXAMPLES = """examples:
  discreet tune rounds=20 privacy.user.clip.norm=0.1,0.3,1 --output outputs/tuned
  discreet tune privacy.user.clip.norm=0.1,0.3 training.learning_rate=0.1,0.3 --mean 20 --cost
  discreet tune --resume --output outputs/tuned --jobs 4
"""
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
    """What was drawn once, before the first trial."""

    overrides: list[str]
    distribution: str
    mean: float
    max_epsilon: float | None
    trials: list[Trial]


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


def candidates_of(words: Sequence[str]) -> list[list[str]]:
    """Every combination of the listed values, each as overrides without lists.

    Raises:
      ConfigError: an override can't be read, is a sweep that is not a list, or there are too many combinations.
    """
    combined = list(itertools.islice(itertools.product(*map(_choices, words)), MOST_CANDIDATES + 1))
    if len(combined) > MOST_CANDIDATES:
        raise ConfigError(f"more than {MOST_CANDIDATES} combinations of settings: list fewer values")
    return [list(combination) for combination in combined]


def _choices(word: str) -> list[str]:
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException as error:
        raise ConfigError(f"{word}: {str(error).splitlines()[0]}") from error
    if not override.is_sweep_override():
        return [word]
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        raise ConfigError(f"{word} is no list of values: discreet tune draws from lists such as a,b or range(1,4)")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def draw_trials(configs: Sequence[RunConfig], count: int, source: RandomSource) -> list[Trial]:
    """So many trials: each draws one of the candidates, uniformly."""
    trials = []
    for _ in range(count):
        candidate = int(source.uniform(1)[0] * len(configs))
        # Reproducible as a whole, but no trial repeats another.
        seed = None if configs[candidate].seed is None else int(source.words(1)[0] >> 33)
        # A number in the name would tell how many trials came before.
        trials.append(Trial(secrets.token_hex(8), candidate, seed))
    return trials


def run_trials(
    configs: Sequence[RunConfig], trials: Sequence[Trial], *, folder: Path, at_a_time: int = 1
) -> tuple[Path | None, Tally]:
    """Runs the trials that have not been run, and gives the folder of the most accurate one, or None if there are none
    or if some failed, which the tally says.

    A trial that was interrupted goes on after its last whole round: its ledger has what it did before.
    """
    jobs = []
    for number, trial in enumerate(trials, start=1):
        files, config = RunFolder(folder / trial.folder), configs[trial.candidate]
        config = replace(config, seed=trial.seed, output_dir=str(files.path))
        jobs.append(Job(f"trial {number} of {len(trials)}", files, config, partial(_run_trial, config, files)))
    tally = run_all(jobs, at_a_time=at_a_time, shared=folder)
    paths = [] if tally.failed else [job.folder.path for job in jobs]
    return max(paths, key=_score, default=None), tally


def _run_trial(config: RunConfig, files: RunFolder) -> None:
    if state_of(files) in OVER:
        return
    if (files.path / "config.yaml").exists():
        simulate(replace(files.read_config(), output_dir=str(files.path), resume=True))
        return
    if files.path.exists():
        shutil.rmtree(files.path)  # ended before its first round: nothing was released
    simulate(config)


def _repeated_rounds(trials: Sequence[Trial], folder: Path) -> int:
    """The most rounds that a trial has paid for beyond those it planned."""
    folders = [RunFolder(folder / trial.folder) for trial in trials]
    spent = [DurableLedger(files.ledger_path).spent(USER).num_releases for files in folders]
    return max([0, *(paid - files.read_config().rounds for paid, files in zip(spent, folders, strict=True))])


def _score(folder: Path) -> float:
    """Accuracy or R2 of a trial's model, which is not the last one if the trial was lost; -inf of an untrained one."""
    privacy = json.loads((folder / "privacy.json").read_text())
    row = model_row(privacy, RunFolder(folder).read_metrics())
    score = row.get(main_score(row))
    return -math.inf if score is None or math.isnan(score) else score


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="discreet tune",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="a setting; a comma lists values to try")
    parser.add_argument(
        "--trials", choices=list(SHAPES), default="logarithmic", help="the distribution of the number of trials"
    )
    parser.add_argument("--mean", type=float, default=10.0, help="the mean number of trials (default: 10)")
    parser.add_argument("--max-epsilon", type=float, help="refuse to start if the choice would cost more")
    parser.add_argument("--output", type=Path, help="the folder of the chosen run (default: outputs/tune_<time>)")
    parser.add_argument(
        "--keep-trials", action="store_true", help="keep the runs that were not chosen: never publish them"
    )
    parser.add_argument("--cost", action="store_true", help="only print what the choice would cost")
    parser.add_argument("--resume", action="store_true", help="go on with the trials that were drawn in --output")
    parser.add_argument(
        "--jobs", default="1", metavar="N", help="so many trials at a time, as tasks of the Ray cluster of ray.address"
    )
    return parser


def _tune(arguments: argparse.Namespace) -> int:
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    output = (arguments.output or Path(f"outputs/tune_{stamp}")).expanduser().resolve()
    number_of_jobs(arguments.jobs)
    if arguments.resume:
        if arguments.overrides or arguments.output is None:
            raise ConfigError("--resume needs --output, the folder of the tune to go on with, and no OVERRIDE")
        return _run(read_tune(output), output, arguments)
    if not arguments.overrides:
        raise ConfigError("there is nothing to try: give settings; a comma lists values (see --help)")
    trials = TrialCount(arguments.trials, arguments.mean)
    configs = [load_config(words) for words in candidates_of(arguments.overrides)]
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
    _check_budget(cost, arguments.max_epsilon)
    if arguments.cost:
        return 0
    if output.exists() and any(output.iterdir()):
        unfinished = (output / TUNE_FILE).exists()
        hint = ": it holds a tune that was not finished, --resume goes on with it" if unfinished else ""
        raise ConfigError(f"--output {output} is not empty{hint}")
    return _run(_begin(arguments, configs, trials, output), output, arguments)


def _begin(arguments: argparse.Namespace, configs: Sequence[RunConfig], trials: TrialCount, output: Path) -> Tune:
    seed = configs[0].seed
    source = source_of(seed).child("tune")
    drawn = draw_trials(configs, trials.draw(source.child("count")), source.child("choices"))
    tune = Tune(arguments.overrides, trials.distribution, trials.mean, arguments.max_epsilon, drawn)
    output.mkdir(parents=True, exist_ok=True)
    replace_file(output / TUNE_FILE, (json.dumps(asdict(tune), indent=2) + "\n").encode())
    return tune


def _run(tune: Tune, output: Path, arguments: argparse.Namespace) -> int:
    trials, folder, at_a_time = TrialCount(tune.distribution, tune.mean), output / "trials", int(arguments.jobs)
    configs = [load_config(words) for words in candidates_of(tune.overrides)]
    if at_a_time > 1:
        check_parallel(configs)
    new = [trial for trial in tune.trials if not (folder / trial.folder).exists()]
    require_room([configs[trial.candidate] for trial in new])
    go_on = f"discreet tune --resume --output {shlex.quote(str(output))}" + (at_a_time > 1) * f" --jobs {at_a_time}"
    folder.mkdir(exist_ok=True)
    with ending(partial(interrupt_below, folder, f"nothing was chosen; to go on: {go_on}")):
        chosen, tally = run_trials(configs, tune.trials, folder=folder, at_a_time=at_a_time)
    if tally.failed:
        tally.tell_failures(f"{go_on}; until then nothing is chosen")
        return 1
    if chosen is None:
        print("no trial was drawn: there is nothing to publish")
        return 0
    require_whole([RunFolder(folder / trial.folder) for trial in tune.trials])
    cost = cost_of(configs, trials, repeated=_repeated_rounds(tune.trials, folder))
    _check_budget(cost, tune.max_epsilon)
    print(f"chosen run: {publish(chosen, output, trials=trials, cost=cost)}")
    print(f"epsilon {cost.selection:.4g} with the choice ({ACCOUNTANT}, delta {cost.delta:g}), in every file of it")
    if not arguments.keep_trials:
        shutil.rmtree(folder)
        (output / TUNE_FILE).unlink()
    return 0


def _check_budget(cost: SelectionCost, max_epsilon: float | None) -> None:
    if max_epsilon is not None and cost.selection > max_epsilon:
        raise ConfigError(f"the choice would cost epsilon {cost.selection:.4g}, above --max-epsilon {max_epsilon:g}")


def main(words: Sequence[str]) -> int:
    """Tunes; 2 if a setting is wrong or the choice would cost too much."""
    arguments = _parser().parse_args(words)
    logging.getLogger("absl").setLevel(logging.ERROR)
    log_to(sys.stdout)
    try:
        with ending(not_begun):
            return _tune(arguments)
    except (ConfigError, LedgerError, ValueError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
