"""Makes a project to start from: a model, data and their description, conf/, a Flower app, tests.

FOLDER must not be there yet, or must be empty. The project trains at once, on invented data; its README says with which
commands, and how to put your own model and data in their place.

examples:
  discreet new my-project
  cd my-project && discreet simulate experiment=quick
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from discreet.settings.places import own_files
from discreet.settings.rules import ConfigError

# Differs from Discreet's own conf/config.yaml: 300 people, each of whom is a client.
SETTINGS = {
    ("data", "name"): "folder",
    ("data", "path"): "data",
    ("data", "num_clients"): "300",
    ("data", "partition"): "natural",
    ("model", "name"): "model:build",
}
NAME = re.compile("[A-Za-z][A-Za-z0-9-]{0,31}")


def command(folder: Annotated[Path, typer.Argument(metavar="FOLDER")]) -> None:
    """Makes the project."""
    folder = folder.expanduser().resolve()
    if not NAME.fullmatch(folder.name):
        rule = "a letter, then letters, digits and hyphens, at most 32, for Flower takes it as the app's name"
        raise ConfigError(f"the name of the folder must be {rule} (got {folder.name!r})")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: name a folder that is not there yet")
        _fill(folder, own_files())
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}") from error
    print(f"made {folder}: cd there, then: discreet simulate experiment=quick")


def _fill(folder: Path, source: Path) -> None:
    ignore, example = shutil.ignore_patterns("__pycache__"), source / "examples" / "own"
    shutil.copytree(source / "examples" / "project", folder, ignore=ignore, dirs_exist_ok=True)
    (folder / "gitignore").rename(folder / ".gitignore")
    shutil.copytree(source / "strategies", folder / "strategies", ignore=ignore)
    shutil.copy(source / "constraints.txt", folder)
    (folder / "data").mkdir()
    for name in ("train.csv", "test.csv", "data.toml"):
        shutil.copy(example / name, folder / "data")
    shutil.copy(example / "model.py", folder)
    for name in ("pyproject.toml", "README.md", "data/data.toml", "model.py"):
        text = (folder / name).read_text().replace("examples.own.model:build", "model:build")
        (folder / name).write_text(text.replace("my-project", folder.name))
    (folder / "conf" / "config.yaml").write_text(_with_settings((source / "conf" / "config.yaml").read_text()))


def _with_settings(text: str) -> str:
    """conf/config.yaml with `SETTINGS`; the comments stay."""
    for (section, name), value in SETTINGS.items():
        setting = re.search(rf"(?m)^{section}:\n(?: .*\n)*?  {name}: (\S+ *)", text)
        assert setting is not None, name
        start, end = setting.span(1)
        text = f"{text[:start]}{value.ljust(end - start - 1)} {text[end:]}"
    return text
