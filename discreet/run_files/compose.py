"""Composes `conf/` into a checked Settings: the only reader of Hydra outside `discreet.cli`.

The folder is the conf/ of the project in the current folder, or Discreet's own: see
`discreet.run_files.places`. Every number that a user can set is in `conf/config.yaml`. A
configuration is checked once, as a whole, before anything starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from discreet.run_files.call import Call
from discreet.run_files.places import conf_folder, conf_for, own_files
from discreet.settings.rules import (
    CALL_SETTINGS,
    ConfigError,
    did_you_mean,
    plain,
    read_json,
    unknown,
)
from discreet.settings.settings import Settings

CONFIG = "config.yaml"
# the start of a value that is quoted already, is a list, or has several values
SYNTAX = re.compile(r"""['"\[\]{}$,]""")
NOT_PART = ("resume=", "hydra.sweep.dir=", "hydra.mode=")  # of what each run of a sweep is given


# In conf/: `${unless:${.noise_multiplier},8.0}` is 8.0, unless the other setting is given.
OmegaConf.register_new_resolver(
    "unless", lambda other, value: value if other is None else None, replace=True
)
# `${below_one_in:${data.num_clients}}` is a power of ten, between a tenth and a hundredth of 1 /
# num_clients.
OmegaConf.register_new_resolver(
    "below_one_in", lambda count: 10.0 ** -(len(str(int(count))) + 1), replace=True
)


def _one_line(error: Exception) -> str:
    """An error message of OmegaConf or Hydra, with the setting that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )
    if lines:
        message = lines[0]
    else:
        message = type(error).__name__
    cause = error.__cause__
    if key:
        if "not in" in message:
            return unknown(key, Settings)
        return f"setting {key}: {message}"
    if cause is None or cause is error:
        return message
    inner = _one_line(cast(Exception, cause))
    if "did you mean" in inner or "setting" in inner:
        return inner
    return f"{message} {inner}"


def _as_json(value: object) -> object:
    number = plain(value)
    if isinstance(number, int | float):
        return number
    return str(value)


def parse_asked(settings: DictConfig | dict[str, Any]) -> tuple[Settings, Call]:
    """The checked Settings, and the call, of composed settings (Hydra's, or a plain dictionary).
    ConfigError: one line that names the setting that is unknown, of the wrong type, or out of
    range."""
    if isinstance(settings, DictConfig):
        try:
            settings = cast(
                dict[str, Any],
                OmegaConf.to_container(settings, resolve=True, throw_on_missing=True),
            )
        except OmegaConfBaseException as error:
            raise ConfigError(_one_line(error)) from error
    of_call = {name: value for name, value in settings.items() if name in CALL_SETTINGS}
    of_run = {name: value for name, value in settings.items() if name not in CALL_SETTINGS}
    call = read_json(Call, json.dumps(of_call, default=_as_json))
    return read_json(Settings, json.dumps(of_run, default=_as_json)), call


def load_config(overrides: Sequence[str] = (), *, conf: Path | None = None) -> Settings:
    """The settings that `load_asked` returns.

    >>> load_config(["rounds=3"]).rounds
    3
    """
    return load_asked(overrides, conf=conf)[0]


def load_asked(
    overrides: Sequence[str] = (), *, of_sweep: bool = False, conf: Path | None = None
) -> tuple[Settings, Call]:
    """Composes `conf/` with Hydra overrides, none of them a list, and checks the result.

    `of_sweep`: the overrides are one run of a sweep, whose experiment may be a sweep itself.
    `conf`: the folder; None: `conf_folder()`. Raises ConfigError: one line that names the setting;
    or the experiment is a sweep and not a single run.
    """
    settings, is_sweep = composed(overrides, conf=conf)
    if is_sweep and not of_sweep:
        raise ConfigError(not_one_run(overrides))
    return parse_asked(settings)


def not_one_run(overrides: Sequence[str]) -> str:
    """The refusal of overrides whose experiment is a sweep, where a single run is asked for."""
    words = " ".join(overrides)
    return f"{words} is a sweep of several runs, not one: discreet simulate {words}"


def check_words(words: Sequence[str]) -> None:
    """Raises ConfigError if the words of a command do not describe a valid run, without importing
    PyTorch.

    For a sweep, only the first run is checked here. The settings of a resumed run are checked
    later.
    """
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    if {"-m", "--multirun"} & {*words}:
        plan, runs = listed_runs(settings)
        asked, is_sweep = composed(runs[0])
        is_sweep = "resume=true" in plan.overrides.task
    else:
        asked, is_sweep = composed(settings)
    if not (is_sweep or asked.resume is True):
        parse_asked(asked)


def listed_runs(words: Sequence[str]) -> tuple[DictConfig, list[list[str]]]:
    """Hydra's own settings of a sweep, and the overrides of each of its runs, none of them a
    list."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode

    with hydra_on_conf(words):
        composer = GlobalHydra.instance().hydra
        assert composer is not None
        given = list(map(quoted, words))
        plan = composer.compose_config(
            "config", given, RunMode.MULTIRUN, with_log_configuration=False
        ).hydra
        listed = [f"{name}={values}" for name, values in (plan.sweeper.params or {}).items()]
        settings = [word for word in plan.overrides.task if not word.startswith(NOT_PART)]
        parser = OverridesParser.create(config_loader=composer.config_loader)
        (runs,) = BasicSweeper.split_arguments(parser.parse_overrides([*listed, *settings]), None)
        return plan, runs


def quoted(word: str) -> str:
    """A word NAME=VALUE that Hydra can read: a path with non-ASCII letters is quoted, and ~ is
    expanded.

    >>> quoted("output_dir=out/größe"), quoted("rounds=3")
    ("output_dir='out/größe'", 'rounds=3')
    """
    name, mark, value = word.partition("=")
    if not mark or SYNTAX.search(value) or (value.isascii() and not value.startswith("~")):
        return word
    return f"{name}='{Path(value).expanduser() if value.startswith('~/') else value}'"


def composed(words: Sequence[str], *, conf: Path | None = None) -> tuple[DictConfig, bool]:
    """Composed settings, and whether the experiment is a sweep."""
    # Imported here, so that code that reads a composed configuration works without Hydra.
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with hydra_on_conf(words, conf=conf):
        composer = GlobalHydra.instance().hydra
        assert composer is not None
        settings = composer.compose_config(
            "config",
            list(map(quoted, words)),
            RunMode.RUN,
            from_shell=False,
            with_log_configuration=False,
        )
    is_sweep = settings.hydra.mode == RunMode.MULTIRUN
    OmegaConf.set_struct(settings, False)
    del settings["hydra"]
    return settings, is_sweep


@contextmanager
def hydra_on_conf(overrides: Sequence[str], *, conf: Path | None = None) -> Iterator[None]:
    """Hydra, initialized on a folder (None: `conf_folder()`). Its errors become a ConfigError in
    one line."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException, OverrideParseException

    folder = conf_for(overrides, conf or conf_folder())
    GlobalHydra.instance().clear()
    try:
        with (
            _with_all_settings(folder) as complete,
            initialize_config_dir(config_dir=str(complete), version_base="1.3"),
        ):
            yield
    except OverrideParseException as error:
        remedy = "quote a value with special characters, such as output_dir='\"a=b\"'"
        if any(word.startswith("=") or word.endswith("=") for word in overrides):
            remedy = "write no spaces around ="
        raise ConfigError(f"{error.override} can't be read as NAME=VALUE: {remedy}") from error
    except HydraException as error:
        raise ConfigError(_said_of(_one_line(error), overrides, folder)) from error


@contextmanager
def _with_all_settings(folder: Path) -> Iterator[Path]:
    """The folder; or, if its config.yaml lacks settings, as that of a project does which an older
    version made, a folder of the same files with Discreet's own defaults under it."""
    conf = own_files() / "conf"
    if folder.resolve() == conf.resolve():
        yield folder
        return
    own = yaml.safe_load((conf / CONFIG).read_text())
    own = {name: value for name, value in own.items() if name not in ("defaults", "hydra")}
    try:
        given = yaml.safe_load((folder / CONFIG).read_text())
    except (OSError, yaml.YAMLError):
        given = None  # Hydra says what is wrong with it
    if not isinstance(given, dict) or not _lacks(given, own):
        yield folder
        return
    with TemporaryDirectory() as scratch:
        complete = Path(scratch)
        for each in folder.iterdir():
            (complete / each.name).symlink_to(each.resolve())
        (complete / CONFIG).unlink()
        merged = OmegaConf.merge(OmegaConf.create(own), OmegaConf.create(given))
        OmegaConf.save(merged, complete / CONFIG)
        yield complete


def _lacks(given: Mapping[Any, Any], own: Mapping[Any, Any]) -> bool:
    """True if a setting of `own` is not in `given`."""
    for name, value in own.items():
        if name not in given:
            return True
        both = isinstance(value, dict) and isinstance(given[name], dict)
        if both and _lacks(given[name], value):
            return True
    return False


def _said_of(message: str, overrides: Sequence[str], conf: Path) -> str:
    """Hydra's message, or a better one about a list or an experiment that does not exist."""
    if "Ambiguous value" in message or "requires --multirun" in message:
        word = next(word for word in overrides if f"'{word}'" in message)
        said = (
            f"{word} is a list of values: discreet simulate --multirun {word} makes a run of each"
        )
        decimal = re.search(r"=([+-]?\d+),(\d+)$", word)
        if decimal is None:
            return said
        return f"{said}. If a decimal number is meant, write {decimal[1]}.{decimal[2]}"
    missing = re.search(r"Could not find 'experiment/(.*)'", message)
    if missing is None:
        return message
    if missing[1] == "default":
        return "there is no experiment=default: omit experiment for the default run"
    names = sorted(
        {
            path.stem
            for folder in (conf, own_files() / "conf")
            for path in folder.glob("experiment/*.yaml")
        }
    )
    hint = did_you_mean(missing[1], names) or ";"
    return f"there is no experiment={missing[1]}{hint} There are {', '.join(names)}"
