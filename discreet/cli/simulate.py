"""Runs an experiment in one process: the same as `flwr run`, without Flower.

conf/config.yaml lists the settings with their meaning and ranges.

With --multirun there is a run for each combination of listed values. All of them are checked before
the first one starts. Their folders are FOLDER/0, FOLDER/1, and so on; FOLDER/multirun.yaml records
the sweep. --jobs N does N runs at a time, as tasks of the Ray cluster at ray.address, or of one
that is started here. A run that fails does not stop the others. If a sweep was interrupted, or some
of its runs failed, `--multirun resume=true hydra.sweep.dir=FOLDER` continues it: it keeps the runs
that are done, and resumes or starts the others.

With --baseline the same clients are trained once more without privacy, into RUN-baseline, to show
the cost of privacy: only for public or made-up data.

examples:
  discreet simulate rounds=5 privacy.user.noise_multiplier=0.8
  discreet simulate experiment=silos
  discreet simulate --baseline output_dir=outputs/first
  discreet simulate --multirun privacy.user.clip.kind=adaptive,fixed
  discreet simulate --multirun --jobs 3 seed=31013,47129,58211
"""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from discreet.cli.console import Words
from discreet.cli.sweep import Sweep, all_succeed, sweep_of
from discreet.deployment.interruption import ending, folder_in, not_begun, override, resumable
from discreet.logs import log_to
from discreet.run_files.call import Call
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.baseline import ENDING, check_public, without_privacy
from discreet.simulation.in_process import simulate
from discreet.simulation.many_runs import check_parallel


def command(
    overrides: Words = None,
    multirun: Annotated[bool, Option("--multirun", "-m", help="a sweep")] = False,
    baseline: Annotated[
        bool, Option("--baseline", help="also train without privacy, for comparison")
    ] = False,
    jobs: Annotated[
        int | None, Option(metavar="N", min=1, help="how many runs of a sweep at a time")
    ] = None,
) -> int:
    """Runs once or as a sweep; exit code 1 if runs of a sweep failed."""
    words = overrides or []
    with ending(partial(not_begun, folder=folder_in(words))):
        sweep = sweep_of(words, multirun=multirun)
        if baseline and (sweep is not None or jobs is not None):
            raise ConfigError("--baseline needs a single run")
        if sweep is not None:
            return _sweep(sweep, jobs or 1)
        if jobs is not None:
            raise ConfigError("--jobs needs a sweep: --multirun, with lists of values")
        config, call = asked_settings(words)
        log_to(sys.stdout, log_format=config.operations.log_format)
        if baseline:
            check_public(config)
        folder = Path(str(call.output_dir))
        with resumable(RunFolder(folder), "discreet", "simulate"):
            simulate(config, call, progress=sys.stdout)
        if baseline:
            _baseline(config, folder, call.device)
    return 0


def _baseline(config: Settings, folder: Path, device: str) -> None:
    """Trains without privacy beside a run, and prints how to compare the two."""
    beside = folder.with_name(f"{folder.name}{ENDING}")
    print("now without privacy, NOT PRIVATE, to compare with")
    call = Call(str(beside), device=device)
    with resumable(RunFolder(beside), "discreet", "simulate"):
        simulate(without_privacy(config), call, progress=sys.stdout)
    print(f"both curves: discreet report {shlex.quote(str(folder))} {shlex.quote(str(beside))}")


def _sweep(sweep: Sweep, at_a_time: int) -> int:
    print(
        f"{len(sweep.runs)} runs are checked before the first one starts; their folders will be "
        f"in {sweep.folder}"
    )
    jobs = sweep.jobs()
    if at_a_time > 1:
        check_parallel([job.plan for job in jobs], [job.device for job in jobs])
    sweep.save()
    log_to(sys.stdout, log_format=jobs[0].plan.log_format)
    again = [
        "discreet",
        "simulate",
        "--multirun",
        "resume=true",
        override("hydra.sweep.dir", sweep.folder),
    ]
    if all_succeed(jobs, at_a_time=at_a_time, shared=sweep.folder, again=shlex.join(again)):
        return 0
    return 1
