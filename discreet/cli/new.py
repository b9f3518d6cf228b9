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

# What differs from Discreet's own conf/config.yaml: 300 people, each of whom is a client.
SETTINGS = {
    ("data", "name"): "folder",
    ("data", "path"): "data",
    ("data", "num_clients"): "300",
    ("data", "partition"): "natural",
    ("model", "name"): "model:build",
}
NAME = re.compile("[A-Za-z][A-Za-z0-9-]{0,31}")
IGNORED = shutil.ignore_patterns("__pycache__")


def make_project(folder: Path, *, source: Path) -> None:
    """Fills a folder from Discreet's own files, which are in `source`: see `discreet.settings.places.own_files`.

    Raises:
      ConfigError: there is something in the folder already, its name is none for an app, or it can't be made.
    """
    project = project_name(folder)
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: name a folder that is not there yet")
        shutil.copytree(source / "examples" / "project", folder, ignore=IGNORED, dirs_exist_ok=True)
        (folder / "gitignore").rename(folder / ".gitignore")
        shutil.copytree(source / "strategies", folder / "strategies", ignore=IGNORED)
        shutil.copy(source / "constraints.txt", folder)
        _copy_example(source / "examples" / "own", folder)
        settings = (source / "conf" / "config.yaml").read_text()
        (folder / "conf" / "config.yaml").write_text(_with_settings(settings))
        for name in ("pyproject.toml", "README.md"):
            path = folder / name
            path.write_text(path.read_text().replace("my-project", project))
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}") from error


def _copy_example(example: Path, folder: Path) -> None:
    """The model and the data of the example."""
    (folder / "data").mkdir()
    for name in ("train.csv", "test.csv"):
        shutil.copy(example / name, folder / "data" / name)
    shutil.copy(example / "model.py", folder / "model.py")
    for name, place in (("data.toml", folder / "data" / "data.toml"), ("model.py", folder / "model.py")):
        place.write_text((example / name).read_text().replace("examples.own.model:build", "model:build"))


def _with_settings(text: str) -> str:
    """conf/config.yaml with `SETTINGS`; the comments stay."""
    for (section, name), value in SETTINGS.items():
        setting = re.search(rf"(?m)^{section}:\n(?: .*\n)*?  {name}: (\S+ *)", text)
        assert setting is not None, name
        start, end = setting.span(1)
        text = f"{text[:start]}{value.ljust(end - start - 1)} {text[end:]}"
    return text


def project_name(folder: Path) -> str:
    """A project's name, which is that of its folder.

    >>> project_name(Path("work/my-trial"))
    'my-trial'

    Raises:
      ConfigError: Flower takes no such name for an app.
    """
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the name of the folder must begin with a letter and hold letters, digits and hyphens alone, at most 32, "
            f"for Flower takes it as the app's name (got {name!r})"
        )
    return name


def command(folder: Annotated[Path, typer.Argument(metavar="FOLDER")]) -> None:
    """Makes the project."""
    make_project(folder.expanduser(), source=own_files())
    print(f"made {folder.expanduser().resolve()}: cd there, then: discreet simulate experiment=quick")
