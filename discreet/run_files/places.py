"""The locations of an app's files: the project in the current folder, the checkout, or the
installed wheel.

A project is a folder whose pyproject.toml has a table [tool.discreet]: a checkout of Discreet, or
one that `discreet new` made.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet")

PACKAGE = Path(__file__).resolve().parent.parent
PACKED = PACKAGE / "app"  # only a wheel has it


def own_files(package: Path = PACKAGE) -> Path:
    """The folder that holds Discreet's own conf, client_app, server_app and strategies."""
    packed = package / PACKED.name
    if packed.is_dir():
        return packed
    return package.parent


def is_project(folder: Path) -> bool:
    """True if a folder is a project."""
    try:
        return "discreet" in tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {})
    except (OSError, ValueError):
        return False


def conf_folder(package: Path = PACKAGE) -> Path:
    """The conf/ that a command composes: that of the project in the current folder, or otherwise
    Discreet's own."""
    here = Path.cwd()
    return (here if is_project(here) else own_files(package)) / "conf"


def conf_for(words: Sequence[str], conf: Path) -> Path:
    """The conf/ that overrides are composed with: `conf`, or Discreet's own if only it has their
    experiments."""
    given = [word.removeprefix("experiment=") for word in words if word.startswith("experiment=")]
    files = [f"experiment/{name}.yaml" for names in given for name in names.split(",")]
    own = own_files() / "conf"
    if all((conf / file).is_file() for file in files) or not all(
        (own / file).is_file() for file in files
    ):
        return conf
    if any(word.startswith(("data.path=", "data.name=")) for word in words):
        used = "settings"
    else:
        used = "data and settings"
    _say_own(",".join(given), used)
    return own


@cache
def _say_own(experiments: str, used: str) -> None:
    told = "experiment=%s is one of Discreet's own: its %s are used, not those of this project"
    logger.warning(told, experiments, used)


def app_folder(package: Path = PACKAGE) -> Path:
    """The app that a command starts: the project in the current folder, or otherwise the checkout.
    ConfigError: there is neither."""
    here = Path.cwd()
    if is_project(here):
        return here
    if own_files(package) != package.parent:
        raise ConfigError(
            f"{here} is not a project: change to a checkout of Discreet, or to a "
            "folder that `discreet new FOLDER` made"
        )
    return package.parent
