"""A node's own data: a folder with a table and a small description, checked against the task before anything is sent.

What `data.toml` in the folder says: `discreet/tasks/folder.py`. What is wrong is said to the owner of the node, in
full; the server only learns that the data do not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from discreet.tasks.examples import Examples
from discreet.tasks.folder import (
    DESCRIPTION,
    FOLDER,
    FolderError,
    TaskShape,
    examples_of,
    read_description,
    read_table,
    shape_of,
)

NodeDataError = FolderError  # of a node's own folder: for its owner's eyes

# Known without loading the demonstration data, which a node with its own does not have.
SHAPES = {
    "digits": TaskShape((1, 8, 8), 10),
    "breast_cancer": TaskShape((30,), 2, scale=(-1.0, 1.0)),
    "mnist": TaskShape((1, 28, 28), 10),
    "fashion_mnist": TaskShape((1, 28, 28), 10),
    "cifar10": TaskShape((3, 32, 32), 10),
    "femnist": TaskShape((1, 28, 28), 62),
    "shakespeare": TaskShape((80,), 98, tokens=True),
}


def load_node_data(folder: Path, task: str) -> Examples:
    """The examples in a node's own folder, for a task of `SHAPES`, or for the one that the folder itself describes
    (`data.name=folder`). Read once per process.

    Raises:
      NodeDataError: what is wrong, with the file, the row or the class.
    """
    return node_table(folder, task)[0]


def node_table(folder: Path, task: str) -> tuple[Examples, TaskShape]:
    """`load_node_data`, with the shape of the task."""
    return _load(folder.expanduser().resolve(), task)


@lru_cache(maxsize=4)
def _load(folder: Path, task: str) -> tuple[Examples, TaskShape]:
    if task not in (*SHAPES, FOLDER):
        known = ", ".join(sorted((*SHAPES, FOLDER)))
        raise NodeDataError(f"no task {task!r}; data of a node's own can be given for {known}")
    description = read_description(folder)
    if description.task not in (None, task):
        raise NodeDataError(f"{folder / DESCRIPTION} gives these data for {description.task}, not for {task}")
    table = read_table(folder, description)
    shape = SHAPES[task] if task != FOLDER else shape_of(description, table, folder)
    what = f"{folder / description.file} and the task {task}"
    return examples_of(table, description, shape=shape, what=what), shape


def main(words: Sequence[str]) -> int:
    """Says whether a folder fits a task, and how many examples it holds."""
    parser = argparse.ArgumentParser(prog="python -m client_app.node_data", description="Checks a node's own data.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("task", help=", ".join((*SHAPES, FOLDER)))
    arguments = parser.parse_args(words)
    try:
        examples = load_node_data(arguments.folder, arguments.task)
    except NodeDataError as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.folder} fits {arguments.task}: {len(examples)} examples")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
