"""A node's own data: a folder with a table and a small description, checked against the task before anything is sent.

`discreet/data/folder.py` says what `data.toml` in the folder holds. What is wrong is said to the owner of the node, in
full; the server only learns that the data do not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from discreet.data.examples import SHAPES, Examples, TaskShape
from discreet.data.folder import FOLDER, read_examples
from discreet.data.targets import FolderError

_read = lru_cache(maxsize=4)(read_examples)


def node_table(folder: Path, task: str) -> tuple[Examples, TaskShape]:
    """The examples in a node's own folder, for a task of `SHAPES`, or for the one that the folder itself describes
    (`data.name=folder`), and their shape. Read once per process.

    Raises:
      FolderError: what is wrong, with the file, the row or the class.
    """
    return _read(folder.expanduser().resolve(), task)


def main(words: Sequence[str]) -> int:
    """Checks a folder against a task, and prints how many examples it holds."""
    parser = argparse.ArgumentParser(prog="python -m discreet.node.node_data", description="Checks a node's own data.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("task", help=", ".join((*SHAPES, FOLDER)))
    arguments = parser.parse_args(words)
    try:
        examples, _ = node_table(arguments.folder, arguments.task)
    except FolderError as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.folder} fits {arguments.task}: {len(examples)} examples")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
