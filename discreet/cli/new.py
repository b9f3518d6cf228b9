"""Makes a new project: a model, data and their description, conf/, a Flower app, tests.

FOLDER must be new or empty. The project can train at once, on invented data; its README has the
commands, and says how to use your own model and data instead. With --table it starts from your own
CSV file, which is copied to FOLDER/data without being read; its README has the next steps.

examples:
  discreet new my-project
  cd my-project && discreet simulate experiment=quick
  discreet new my-hospital --table hospital.csv
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from discreet.run_files.places import own_files
from discreet.run_files.whole_files import fill_folder, new_folder
from discreet.settings.rules import ConfigError

# Differs from Discreet's own conf/config.yaml: 300 people, each of whom is a client.
SETTINGS = {
    ("data", "name"): "folder",
    ("data", "path"): "data",
    ("data", "num_clients"): "300",
    ("data", "partition"): "natural",
    ("model", "name"): "model:build",
}
# Settings of a project that starts from a table, with one client for each person in it.
OF_A_TABLE = SETTINGS | {("model", "name"): "linear", ("data", "num_clients"): "200"}
OF_TABLES = (
    "table.yaml",
    "table_once.yaml",
    "hospitals.yaml",
    "hospitals_secure.yaml",
    "hospitals_once.yaml",
)
NAME = re.compile("[A-Za-z][A-Za-z0-9-]{0,31}")


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    table: Annotated[
        Path | None, Option("--table", metavar="FILE", help="a CSV file to start from")
    ] = None,
) -> None:
    """Makes the project."""
    folder = folder.expanduser().resolve()
    if not NAME.fullmatch(folder.name):
        rule = (
            "a letter, then letters, digits and hyphens, at most 32, for Flower takes it as the "
            "app's name"
        )
        raise ConfigError(f"the name of the folder must be {rule} (got {folder.name!r})")
    if table is not None and not table.is_file():
        raise ConfigError(f"--table: {table} is no file")
    try:
        if folder.exists():
            fill_folder(folder, lambda made: _fill(made, folder.name, own_files(), table))
        else:
            with new_folder(folder) as made:
                _fill(made, folder.name, own_files(), table)
    except FileExistsError as error:
        raise ConfigError(f"{error}: name a folder that is not there yet") from error
    except shutil.Error as error:  # a list of all files and their errors
        raise ConfigError(f"{folder} can't be made: {_first(error)}") from error
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error.strerror or error}") from error
    start = "discreet simulate experiment=quick"
    if table is not None:
        start = f"discreet data split data/{table.name} --owner COLUMN (README.md has all steps)"
    print(f"made {folder}: cd there, then: {start}")


def _first(error: shutil.Error) -> str:
    """The error of the first of the files that could not be copied."""
    (_, _, reason), *_ = error.args[0]
    return str(reason)


def _fill(folder: Path, name: str, source: Path, table: Path | None) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    example = source / "examples" / "own"
    shutil.copytree(source / "examples" / "project", folder, ignore=ignore, dirs_exist_ok=True)
    (folder / "gitignore").rename(folder / ".gitignore")
    shutil.copytree(source / "strategies", folder / "strategies", ignore=ignore)
    shutil.copy(source / "constraints.txt", folder)
    (folder / "data").mkdir()
    shutil.copy(example / "model.py", folder)
    if table is None:
        (folder / "table.md").unlink()
        for file in ("train.csv", "test.csv", "data.toml"):
            shutil.copy(example / file, folder / "data")
        _replace(folder / "data" / "data.toml", name)
        settings = SETTINGS
    else:
        shutil.copy(table, folder / "data")
        with (folder / ".gitignore").open("a") as ignored:
            ignored.write("data/*.csv\n")
        for file in OF_TABLES:
            shutil.copy(source / "conf" / "experiment" / file, folder / "conf" / "experiment")
        (folder / "table.md").replace(folder / "README.md")
        _replace(folder / "README.md", name, ("hospital.csv", table.name))
        shutil.rmtree(folder / "tests")  # they test the invented data
        settings = OF_A_TABLE
    for file in ("pyproject.toml", "README.md", "model.py"):
        _replace(folder / file, name)
    text = (source / "conf" / "config.yaml").read_text()
    (folder / "conf" / "config.yaml").write_text(_with_settings(text, settings))


def _replace(path: Path, project: str, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in (("examples.own.model:build", "model:build"), ("my-project", project), *pairs):
        text = text.replace(old, new)
    path.write_text(text)


def _with_settings(text: str, settings: Mapping[tuple[str, str], str]) -> str:
    """The text of conf/config.yaml with these settings and its comments."""
    for (section, name), value in settings.items():
        setting = re.search(rf"(?m)^{section}:\n(?: .*\n)*?  {name}: (\S+ *)", text)
        assert setting is not None, name
        start, end = setting.span(1)
        text = f"{text[:start]}{value.ljust(end - start - 1)} {text[end:]}"
    return text
