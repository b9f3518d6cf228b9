"""Checks a node's own data before it starts:

python -m discreet.deployment.node_data /srv/data digits
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from discreet.data.examples import SHAPES
from discreet.data.folder import node_table
from discreet.data.targets import FolderError
from discreet.settings.data import FOLDER


def main(words: Sequence[str]) -> int:
    """Prints the number of examples in a folder for a task; 2 if they do not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m discreet.deployment.node_data", description=main.__doc__
    )
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
