"""Sweeps: a run for each combination of listed values, as composed by Hydra, and the file by which
a sweep is resumed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from discreet.deployment.interruption import ending, interrupt_below
from discreet.run_files.call import Call
from discreet.run_files.compose import NOT_PART, listed_runs, load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.whole_files import replace_file
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.in_process import check
from discreet.simulation.many_runs import Job, go_on, run_all

logger = logging.getLogger("discreet")

MOST_CANDIDATES = 200
PLAN = "multirun.yaml"
PARAMS = "hydra.sweeper.params"
RAY = "ray."


@dataclass(frozen=True)
class Sweep:
    """Several runs: the overrides and Hydra's own settings of the sweep, and the overrides of each
    run, without lists. The folder is absolute."""

    folder: Path
    settings: tuple[str, ...]
    hydra: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]

    def name(self, number: int) -> str:
        """`run 3 of 11 (rounds=40)`: its number, from 1, and the settings in which it differs from
        other runs."""
        same = set.intersection(*map(set, self.runs))
        own = ", ".join(word for word in self.runs[number - 1] if word not in same)
        return f"run {number} of {len(self.runs)}" + (f" ({own})" if own else "")

    def save(self) -> None:
        """Makes the folder and, unless it exists, the file that records the sweep, in Hydra's
        format."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / PLAN).exists():
            started = OmegaConf.create(
                {"hydra": {"overrides": {"hydra": [*self.hydra], "task": [*self.settings]}}}
            )
            replace_file(self.folder / PLAN, OmegaConf.to_yaml(started).encode())

    def jobs(self) -> list[Job]:
        """Every run, checked. Raises ConfigError: the fault of the first run that has one."""
        found = []
        for number, overrides in enumerate(self.runs):
            folder = RunFolder(self.folder / str(number))
            name = self.name(number + 1)
            try:
                config, call = load_asked(overrides, of_sweep=True)
                if call.output_dir is not None:
                    raise ConfigError(
                        "output_dir is chosen by a sweep: give hydra.sweep.dir=FOLDER"
                    )
                plan = check(config, call)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            decided = plan.privacy
            work = partial(go_on, folder, name, config, device=call.device, decided=decided)
            found.append(Job(name, folder, plan, work, call.device))
        return found


def sweep_of(overrides: Sequence[str], *, multirun: bool) -> Sweep | None:
    """The sweep that overrides ask for, or with `resume=true` the recorded one in hydra.sweep.dir.
    None for a single run: without `multirun`, if the experiment is not a sweep. Raises ConfigError:
    the settings can't be composed, or there is no such sweep to resume."""
    asked, is_sweep = composed(overrides)
    if not (multirun or is_sweep):
        return None
    if "resume=true" in overrides:
        return _resumed(asked, named=any(word.startswith("hydra.sweep.dir=") for word in overrides))
    if (asked.folder / PLAN).exists():
        raise ConfigError(
            f"hydra.sweep.dir={asked.folder} holds a sweep already: resume=true continues it"
        )
    return asked


def composed(overrides: Sequence[str]) -> tuple[Sweep, bool]:
    """The sweep composed from overrides, and True if they ask for one by hydra.mode."""
    plan, runs = listed_runs(overrides)
    for word in plan.overrides.hydra:
        if not word.lstrip("+").startswith((*NOT_PART, PARAMS)):
            raise ConfigError(
                f"{word} is not of a sweep: it starts its runs itself, --jobs N so many at a time"
            )
    settings, of_hydra = (
        tuple(word for word in given if not word.startswith(NOT_PART))
        for given in (plan.overrides.task, plan.overrides.hydra)
    )
    folder = Path(plan.sweep.dir).expanduser().resolve()
    return Sweep(folder, settings, of_hydra, tuple(map(tuple, runs))), plan.mode == RunMode.MULTIRUN


def _resumed(asked: Sweep, *, named: bool) -> Sweep:
    """The recorded sweep in a folder, on the currently requested Ray cluster."""
    path = asked.folder / PLAN
    if not named or not path.exists():
        if named:
            where = f"{asked.folder} holds none"
        else:
            where = "name its folder"
        raise ConfigError(
            f"resume=true of a sweep continues the one in hydra.sweep.dir=FOLDER: {where}"
        )
    try:
        plan = OmegaConf.load(path)
        before, _ = composed([*plan.hydra.overrides.hydra, *plan.hydra.overrides.task])
    except (OmegaConfBaseException, YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if not all(word.startswith(RAY) for word in asked.settings):
        given = " ".join(before.settings)
        raise ConfigError(
            f"the sweep in {asked.folder} was started with {given}: give no settings but "
            "ray.address"
        )
    runs = before.runs
    if asked.settings:
        runs = tuple(
            (*(word for word in run if not word.startswith(RAY)), *asked.settings) for run in runs
        )
    return replace(before, folder=asked.folder, runs=runs)


def candidates_of(overrides: Sequence[str]) -> list[tuple[Settings, Call]]:
    """The settings, and the call, of every combination of the listed values. Raises ConfigError: a
    setting is wrong, or there are none or too many combinations."""
    if not overrides:
        raise ConfigError(
            "there is nothing to try: give settings; a comma lists values (see --help)"
        )
    candidates = composed(overrides)[0].runs
    if len(candidates) > MOST_CANDIDATES:
        raise ConfigError(
            f"more than {MOST_CANDIDATES} combinations of settings: list fewer values"
        )
    return [load_asked(words, of_sweep=True) for words in candidates]


def all_succeed(
    jobs: Sequence[Job], *, at_a_time: int, shared: Path, again: str, until_then: str = ""
) -> bool:
    """Does runs in a shared folder. `again` is the command that resumes them; it is printed if any
    run did not end."""
    again += f" --jobs {at_a_time}" * (at_a_time > 1) + until_then
    with ending(partial(interrupt_below, shared, f"to resume: {again}")):
        failed = run_all(jobs, at_a_time=at_a_time, shared=shared)
    if failed:
        logger.error("%d of %d runs failed:", len(failed), len(jobs))
        for name, reason in failed.items():
            logger.error("  %s: %s", name, reason)
        logger.error("to repeat them: %s", again)
    return not failed
