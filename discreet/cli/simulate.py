"""The same experiment as `flwr run`, in one process and without Flower: `discreet simulate rounds=5`.

Hydra's command line: overrides, `--help`, `--cfg job`, and sweeps with `--multirun`. All runs of a sweep are checked
before the first one starts. They lie in FOLDER/0, FOLDER/1, and so on; FOLDER/multirun.yaml says what the sweep was
started with. `--jobs N` does N runs at a time, as tasks of a Ray cluster. A run that fails does not stop the others. If
a sweep was ended early, or runs of it failed, `--multirun resume=true hydra.sweep.dir=FOLDER` goes on with it: it keeps
the runs that are done, and resumes or starts the others.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from discreet.config import ConfigError, RunConfig, conf_folder, hydra_on_conf, load_config, parse_config
from discreet.deployment.interruption import ending, interrupt_below, not_begun, override, resumable
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import OVER, RunFolder, replace_file, state_of, with_output_folder
from discreet.logs import log_to
from discreet.places import conf_for
from discreet.simulation.in_process import check, simulate
from discreet.simulation.job import Job
from discreet.simulation.many_runs import check_parallel, number_of_jobs, run_all

logger = logging.getLogger("discreet")

PROGRAM = ("discreet", "simulate")
PLAN = "multirun.yaml"
OPTIONS = {"-m", "--multirun"}
JOBS = "--jobs"
NOT_PART = ("resume=", "hydra.sweep.dir=", "hydra.mode=")
PARAMS = "hydra.sweeper.params"
RAY = "ray."


@dataclass(frozen=True)
class Sweep:
    """What a sweep runs.

    Attributes:
      folder: of the whole sweep, absolute.
      settings: the overrides that it was started with, with their lists.
      hydra: what it was started with of Hydra's own settings: lists, as `hydra.sweeper.params.rounds="1,2"`.
      runs: the overrides of each run, without lists.
    """

    folder: Path
    settings: tuple[str, ...]
    hydra: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]

    def name(self, number: int) -> str:
        """`run 3 of 11 (rounds=40)`: its number, from 1, and the settings in which it differs from other runs."""
        same = set.intersection(*map(set, self.runs))
        own = ", ".join(word for word in self.runs[number - 1] if word not in same)
        return f"run {number} of {len(self.runs)}" + (f" ({own})" if own else "")

    def go_on(self, at_a_time: int) -> str:
        """The command that goes on with it."""
        jobs = [] if at_a_time == 1 else [JOBS, str(at_a_time)]
        return shlex.join([*PROGRAM, "--multirun", *jobs, "resume=true", override("hydra.sweep.dir", self.folder)])

    def save(self) -> None:
        """Makes the folder, and writes what the sweep was started with, as Hydra does, unless that is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / PLAN).exists():
            plan = {"hydra": {"overrides": {"hydra": [*self.hydra], "task": [*self.settings]}}}
            replace_file(self.folder / PLAN, OmegaConf.to_yaml(OmegaConf.create(plan)).encode())

    def jobs(self) -> list[Job]:
        """Every run, checked.

        Raises:
          ConfigError: what is wrong with the first run that has a fault.
        """
        found = []
        for number, overrides in enumerate(self.runs):
            folder, name = RunFolder(self.folder / str(number)), self.name(number + 1)
            try:
                config = load_config(overrides, of_sweep=True)
                if config.output_dir is not None:
                    raise ConfigError("output_dir is chosen by a sweep: give hydra.sweep.dir=FOLDER")
                resolved = check(config)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            found.append(Job(name, folder, config, partial(_run_of_sweep, config, resolved, folder, name)))
        return found


def sweep_of(words: Sequence[str]) -> Sweep | None:
    """The sweep that a command line asks for, or None if it asks for a single run or for one of Hydra's own pages.

    With `resume=true` it is the sweep in hydra.sweep.dir, with the settings that it was started with.

    Raises:
      ConfigError: the settings can't be composed, or there is no such sweep to go on with.
    """
    overrides = [word for word in words if not word.startswith("-")]
    options = {*words} - {*overrides}
    if not options <= OPTIONS:
        return None
    asked, is_sweep = _composed(overrides)
    if not (options or is_sweep):
        return None
    if "resume=true" in overrides:
        return _resumed(asked, named=any(word.startswith("hydra.sweep.dir=") for word in overrides))
    if (asked.folder / PLAN).exists():
        raise ConfigError(f"hydra.sweep.dir={asked.folder} holds a sweep already: resume=true goes on with it")
    return asked


def _composed(overrides: Sequence[str]) -> tuple[Sweep, bool]:
    """The sweep that overrides make, and whether they ask for one by hydra.mode."""
    with hydra_on_conf(overrides):
        composer = GlobalHydra.instance().hydra
        assert composer is not None
        plan = composer.compose_config("config", list(overrides), RunMode.MULTIRUN, with_log_configuration=False).hydra
        for word in plan.overrides.hydra:
            if not word.lstrip("+").startswith((*NOT_PART, PARAMS)):
                raise ConfigError(f"{word} is not of a sweep: it starts its runs itself, --jobs N so many at a time")
        listed = [f"{name}={values}" for name, values in (plan.sweeper.params or {}).items()]
        settings, of_hydra = (
            tuple(word for word in given if not word.startswith(NOT_PART))
            for given in (plan.overrides.task, plan.overrides.hydra)
        )
        parser = OverridesParser.create(config_loader=composer.config_loader)
        (runs,) = BasicSweeper.split_arguments(parser.parse_overrides([*listed, *settings]), None)
        folder = Path(plan.sweep.dir).expanduser().resolve()
        return Sweep(folder, settings, of_hydra, tuple(map(tuple, runs))), plan.mode == RunMode.MULTIRUN


def _resumed(asked: Sweep, *, named: bool) -> Sweep:
    """The sweep in a folder, on the Ray cluster that is asked for now."""
    path = asked.folder / PLAN
    if not named or not path.exists():
        where = f"{asked.folder} holds none" if named else "name its folder"
        raise ConfigError(f"resume=true of a sweep goes on with the one in hydra.sweep.dir=FOLDER: {where}")
    try:
        plan = OmegaConf.load(path)
        before, _ = _composed([*plan.hydra.overrides.hydra, *plan.hydra.overrides.task])
    except (OmegaConfBaseException, YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    cluster = tuple(word for word in asked.settings if word.startswith(RAY))
    if len(cluster) < len(asked.settings) and _elsewhere(asked.runs) != _elsewhere(before.runs):
        given = " ".join(before.settings)
        raise ConfigError(f"the sweep in {asked.folder} was started with {given}: give the same settings or none")
    runs = tuple((*run, *cluster) for run in (_elsewhere(before.runs) if cluster else before.runs))
    return replace(before, folder=asked.folder, runs=runs)


def _elsewhere(runs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Runs without the settings of the cluster that they are computed on, which is not part of what they are."""
    return [tuple(word for word in run if not word.startswith(RAY)) for run in runs]


def _run(config: RunConfig) -> None:
    config = with_output_folder(config)
    with resumable(RunFolder(Path(str(config.output_dir))), *PROGRAM):
        simulate(config, progress=sys.stdout)


def _run_of_sweep(config: RunConfig, resolved: RunConfig, files: RunFolder, name: str) -> None:
    if state_of(files) in OVER and (files.path / "privacy.json").exists():
        logger.info("%s has ended already, and is kept", name)
        return
    logger.info("%s", name)
    begun = files.ledger_path.exists() or (files.path / "config.yaml").exists()
    mine = replace(config, output_dir=str(files.path), resume=begun)
    simulate(mine, resolved=replace(mine, privacy=resolved.privacy), progress=sys.stdout)


def _refuse(error: Exception) -> NoReturn:
    print(f"discreet: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def main(words: Sequence[str]) -> int:
    """Checks the overrides before Hydra starts, so that a mistake in them is said in one line.

    Exit code 2 if there is one, 1 if runs of a sweep failed.
    """
    with ending(not_begun):
        try:
            at_a_time, words = _at_a_time(words)
            sweep = sweep_of(words)
            if sweep is not None:
                return _sweep(sweep, at_a_time or 1)
            if at_a_time is not None:
                raise ConfigError("--jobs is of a sweep: --multirun, with lists of values")
            if not any(word.startswith("-") for word in words):
                run_config(words)
        except (ConfigError, LedgerError) as error:
            _refuse(error)
        _with_hydra(_job, words)
    return 0


def _at_a_time(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """How many runs at a time are asked for, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(JOBS)
    try:
        found, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError("--jobs must be a whole number, at least 1 (got none)") from error
    return (None if found.jobs is None else number_of_jobs(found.jobs)), others


def _sweep(sweep: Sweep, at_a_time: int) -> int:
    print(f"{len(sweep.runs)} runs are checked before the first one starts; they will lie in {sweep.folder}")
    jobs = sweep.jobs()
    if at_a_time > 1:
        check_parallel([job.config for job in jobs])
    sweep.save()
    log_to(sys.stdout, log_format=jobs[0].config.operations.log_format)
    again = sweep.go_on(at_a_time)
    with ending(partial(interrupt_below, sweep.folder, f"to go on: {again}")):
        tally = run_all(jobs, at_a_time=at_a_time, shared=sweep.folder)
    if tally.failed:
        tally.tell_failures(again)
    return 1 if tally.failed else 0


def _job(settings: DictConfig) -> None:
    try:
        config = run_config(HydraConfig.get().overrides.task) if settings.resume is True else parse_config(settings)
        log_to(sys.stdout, log_format=config.operations.log_format)
        _run(config)
    except (ConfigError, LedgerError) as error:
        _refuse(error)  # Hydra would print a traceback of forty lines


def _with_hydra(job: Callable[[DictConfig], None], words: Sequence[str]) -> None:
    """Runs a job, or one of Hydra's own pages; Hydra reads its words where a program's words are."""
    before = sys.argv
    sys.argv = ["discreet simulate", *words]
    try:
        hydra.main(config_path=str(conf_for(words, conf_folder())), config_name="config", version_base="1.3")(job)()
    finally:
        sys.argv = before
