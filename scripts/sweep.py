"""A sweep of `scripts.simulate --multirun`: its runs are checked before the first one, and it goes on where it ended.

Hydra keeps what a sweep was started with in FOLDER/multirun.yaml; its runs lie in FOLDER/0, FOLDER/1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from discreet.config import ConfigError, RunConfig, hydra_on_conf, load_config
from discreet.federated.run_folder import RunFolder, read_status
from simulation.in_process import check

PLAN = "multirun.yaml"
OPTIONS = ("-m", "--multirun")
NOT_PART = ("resume=", "hydra.sweep.dir=", "hydra.mode=")
ENDED = ("finished", "stopped")


@dataclass(frozen=True)
class Sweep:
    """What a sweep runs.

    Attributes:
      folder: of the whole sweep, absolute.
      settings: the overrides that it was started with, lists among them.
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


def sweep_of(words: Sequence[str]) -> Sweep | None:
    """The sweep that a command line asks for, or None if it asks for a single run or for one of Hydra's own pages.

    With `resume=true` it is the one in hydra.sweep.dir, with the settings that it was started with.

    Raises:
      ConfigError: the settings can't be composed, or there is no such sweep to go on with.
    """
    options = [word for word in words if word.startswith("-")]
    if not {*options} <= {*OPTIONS}:
        return None
    overrides = [word for word in words if word not in options]
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
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        plan = hydra.compose_config("config", list(overrides), RunMode.MULTIRUN, with_log_configuration=False).hydra
        listed = [f"{name}={values}" for name, values in (plan.sweeper.params or {}).items()]
        settings, of_hydra = (
            tuple(word for word in given if not word.startswith(NOT_PART))
            for given in (plan.overrides.task, plan.overrides.hydra)
        )
        parser = OverridesParser.create(config_loader=hydra.config_loader)
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


def check_sweep(sweep: Sweep) -> None:
    """Checks every run of a sweep, before the first one starts.

    Raises:
      ConfigError: what is wrong with the first run that has a fault.
    """
    for number, overrides in enumerate(sweep.runs, start=1):
        try:
            config = load_config(overrides, of_sweep=True)
            if config.output_dir is not None:
                raise ConfigError("output_dir is chosen by a sweep: give hydra.sweep.dir=FOLDER")
            check(config)
        except ConfigError as error:
            raise ConfigError(f"{sweep.name(number)}: {error}") from error


def run_in(folder: Path, config: RunConfig) -> RunConfig | None:
    """The configuration of a sweep's run in its folder: to start, to go on, or None if the run has ended already."""
    files = RunFolder(folder)
    status = read_status(files)
    if status is not None and status.state in ENDED and (folder / "privacy.json").exists():
        return None
    begun = files.ledger_path.exists() or (folder / "config.yaml").exists()
    return replace(config, output_dir=str(folder), resume=begun)
