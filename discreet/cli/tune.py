"""Tries settings and keeps the best run, and accounts for the cost of selecting it.

Commas separate values to try. Each trial draws one value of each list, uniformly, and trains. The
number of trials is drawn before the first one, from --trials with mean --mean (Papernot and Steinke
2022). The run with the best accuracy (of regression: R2) on the public test set is moved to
OUTPUT/chosen; the others are deleted, because the guarantee assumes an observer who sees only the
chosen run. For the same reason keep the number of trials to yourself. Every file of the chosen run
states the cost of the selection, not that of a trial.

The trials are drawn once, and stored before the first one starts: if a tune was interrupted,
--resume continues the same trials. Abandoning a tune still costs whatever its trials spent: add up
their ledgers.

examples:
  discreet tune rounds=20 privacy.user.clip.norm=0.1,0.3,1 --output outputs/tuned
  discreet tune privacy.user.clip.norm=0.1,0.3 training.learning_rate=0.1,0.3 --mean 20 --cost
  discreet tune --resume --output outputs/tuned --jobs 4
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from discreet.cli.console import Words, new_folder
from discreet.cli.sweep import all_succeed, candidates_of
from discreet.deployment.interruption import ending, not_begun
from discreet.logs import log_to
from discreet.planning.plan import planned
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.simulation.many_runs import Job, check_parallel
from discreet.simulation.tuning import (
    CHOSEN,
    TRIALS,
    Tune,
    drawn,
    finished,
    price,
    publish_best,
    read_tune,
    trial_jobs,
)


def command(
    overrides: Words = None,
    trials: Annotated[
        Literal["logarithmic", "geometric", "poisson"],
        Option(help="the distribution of the number of trials"),
    ] = "logarithmic",
    mean: Annotated[float, Option(help="the mean number of trials")] = 10.0,
    max_epsilon: Annotated[
        float | None, Option(help="refuse to start if the choice would cost more")
    ] = None,
    output: Annotated[
        Path | None, Option(help="the folder of the chosen run (outputs/tune_TIME)")
    ] = None,
    cost: Annotated[bool, Option("--cost", help="only print what the choice would cost")] = False,
    resume: Annotated[bool, Option("--resume", help="resume the trials of --output")] = False,
    jobs: Annotated[
        int, Option(metavar="N", min=1, help="trials at a time, as tasks of a Ray cluster")
    ] = 1,
) -> int:
    """Tunes; exit code 1 if trials failed."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    log_to(sys.stdout)
    folder = (output or new_folder("outputs/tune_")).expanduser().resolve()
    with ending(partial(not_begun, folder=RunFolder(folder))):
        if resume and (overrides or output is None):
            raise ConfigError(
                "--resume needs --output, the folder of the tune to resume, and no settings"
            )
        if resume and (folder / CHOSEN).exists():
            print(finished(folder))
            return 0
        if resume:
            tune = read_tune(folder)
        else:
            tune = Tune(overrides or [], trials, mean, max_epsilon, [])
        candidates = candidates_of(tune.overrides)
        plans = [planned(settings) for settings, _ in candidates]
        if any(call.output_dir is not None or call.resume for _, call in candidates):
            raise ConfigError("output_dir and resume are chosen by discreet tune: give --output")
        devices = [call.device for _, call in candidates]
        if not resume:
            print(price(tune, plans))
            if cost:
                return 0
            tune = drawn(tune, plans, folder)
        if jobs > 1:
            check_parallel(plans, devices)
        runs = trial_jobs(tune, plans, devices, folder / TRIALS)
        if not _all_done(runs, jobs, folder):
            return 1
        if runs:
            print(publish_best(tune, plans, [job.folder for job in runs], folder))
        else:
            print("no trial was drawn: there is nothing to publish")
    return 0


def _all_done(runs: Sequence[Job], at_a_time: int, folder: Path) -> bool:
    """Does the trials of the tune in a folder. False if some failed; the log then has the command
    that resumes them."""
    return all_succeed(
        runs,
        at_a_time=at_a_time,
        shared=folder / TRIALS,
        again=f"discreet tune --resume --output {shlex.quote(str(folder))}",
        until_then="; until then nothing is chosen",
    )
