"""The same experiment as `flwr run`, in one process and without Ray: `discreet simulate rounds=5`.

Hydra's command line: overrides, `--help`, `--cfg job`, and sweeps with `--multirun`. All runs of a sweep are checked
before the first one starts. They lie in FOLDER/0, FOLDER/1, and so on; FOLDER/multirun.yaml says what the sweep was
started with. If a sweep was ended early, `--multirun resume=true hydra.sweep.dir=FOLDER` goes on with it: it keeps the
runs that are done, and resumes or starts the others.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from discreet.federated.run_folder import OVER, RunFolder, state_of, with_output_folder
from discreet.logs import log_to
from discreet.simulation.in_process import check, simulate

logger = logging.getLogger("discreet")

PROGRAM = ("discreet", "simulate")
PLAN = "multirun.yaml"
OPTIONS = {"-m", "--multirun"}
NOT_PART = ("resume=", "hydra.sweep.dir=", "hydra.mode=")


@dataclass(frozen=True)
class Sweep:
    """What a sweep runs.

    Attributes:
      folder: of the whole sweep, absolute.
      settings: the overrides that it was started with, with their lists.
      hydra: overrides of Hydra's own settings, such as the launcher.
      runs: the overrides of each run, without lists.
    """

    folder: Path
    settings: tuple[str, ...]
    hydra: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]

    @property
    def words(self) -> list[str]:
        """The command line for Hydra."""
        return ["--multirun", *self.hydra, *self.settings, f"hydra.sweep.dir='{self.folder}'"]

    def name(self, number: int) -> str:
        """`run 3 of 11 (rounds=40)`: its number, from 1, and the settings in which it differs from other runs."""
        same = set.intersection(*map(set, self.runs))
        own = ", ".join(word for word in self.runs[number - 1] if word not in same)
        return f"run {number} of {len(self.runs)}" + (f" ({own})" if own else "")

    def ending(self) -> AbstractContextManager[None]:
        """Says how to go on if the sweep is ended while the block runs."""
        command = [*PROGRAM, "--multirun", "resume=true", override("hydra.sweep.dir", self.folder)]
        return ending(partial(interrupt_below, self.folder, f"to go on: {shlex.join(command)}"))

    def checked(self) -> list[RunConfig]:
        """The configuration of every run, with its noise resolved.

        Raises:
          ConfigError: what is wrong with the first run that has a fault.
        """
        found = []
        for number, overrides in enumerate(self.runs, start=1):
            try:
                config = load_config(overrides, of_sweep=True)
                if config.output_dir is not None:
                    raise ConfigError("output_dir is chosen by a sweep: give hydra.sweep.dir=FOLDER")
                found.append(check(config))
            except ConfigError as error:
                raise ConfigError(f"{self.name(number)}: {error}") from error
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
    with hydra_on_conf([]):
        composer = GlobalHydra.instance().hydra
        assert composer is not None
        plan = composer.compose_config("config", list(overrides), RunMode.MULTIRUN, with_log_configuration=False).hydra
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
    """The sweep in a folder, with the launcher that is asked for now."""
    path = asked.folder / PLAN
    if not named or not path.exists():
        where = f"{asked.folder} holds none" if named else "name its folder"
        raise ConfigError(f"resume=true of a sweep goes on with the one in hydra.sweep.dir=FOLDER: {where}")
    try:
        plan = OmegaConf.load(path)
        before, _ = _composed([*plan.hydra.overrides.hydra, *plan.hydra.overrides.task])
    except (OmegaConfBaseException, YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if asked.settings and asked.runs != before.runs:
        given = " ".join(before.settings)
        raise ConfigError(f"the sweep in {asked.folder} was started with {given}: give the same settings or none")
    return replace(before, folder=asked.folder, hydra=asked.hydra or before.hydra)


def _run(config: RunConfig) -> None:
    config = with_output_folder(config)
    with resumable(RunFolder(Path(str(config.output_dir))), *PROGRAM):
        simulate(config, progress=sys.stdout)


def _run_of_sweep(config: RunConfig, sweep: Sweep, checked: Sequence[RunConfig]) -> None:
    job = HydraConfig.get()
    number, files = int(job.job.num), RunFolder(Path(job.runtime.output_dir).resolve())
    name = sweep.name(number + 1)
    if state_of(files) in OVER and (files.path / "privacy.json").exists():
        logger.info("%s has ended already, and is kept", name)
        return
    logger.info("%s", name)
    begun = files.ledger_path.exists() or (files.path / "config.yaml").exists()
    mine = replace(config, output_dir=str(files.path), resume=begun)
    with sweep.ending():
        simulate(mine, resolved=replace(mine, privacy=checked[number].privacy), progress=sys.stdout)


def _refuse(error: Exception) -> NoReturn:
    print(f"discreet: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def main(words: Sequence[str]) -> int:
    """Checks the overrides before Hydra starts, so that a mistake in them is said in one line; exit code 2."""
    with ending(not_begun):
        _main(words)
    return 0


def _main(words: Sequence[str]) -> None:
    checked: list[RunConfig] = []
    try:
        sweep = sweep_of(words)
        if sweep is not None:
            print(f"{len(sweep.runs)} runs are checked before the first one starts; they will lie in {sweep.folder}")
            checked = sweep.checked()
            words = sweep.words
        elif not any(word.startswith("-") for word in words):
            run_config(words)
    except ConfigError as error:
        _refuse(error)

    def job(settings: DictConfig) -> None:
        try:
            resumed = settings.resume is True and sweep is None
            config = run_config(HydraConfig.get().overrides.task) if resumed else parse_config(settings)
            log_to(sys.stdout, log_format=config.operations.log_format)
            if sweep is None:
                _run(config)
            else:
                _run_of_sweep(config, sweep, checked)
        except (ConfigError, LedgerError) as error:
            # Hydra would print a traceback of forty lines.
            _refuse(error)

    with sweep.ending() if sweep else nullcontext():
        _with_hydra(job, words)


def _with_hydra(job: Callable[[DictConfig], None], words: Sequence[str]) -> None:
    """Runs a job, or one of Hydra's own pages; Hydra reads its words where a program's words are."""
    before = sys.argv
    sys.argv = ["discreet simulate", *words]
    try:
        hydra.main(config_path=str(conf_folder()), config_name="config", version_base="1.3")(job)()
    finally:
        sys.argv = before
