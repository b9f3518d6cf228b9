"""The code that a node may run: `python -m discreet.deployment.approve` puts this checkout's app in a folder for it.

A SuperLink sends its nodes the code of each run. A node whose folder of apps can't be written runs what its owner put
there, and refuses everything else: see docker-compose.node.yml.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab

from discreet.settings.places import app_folder


def main(words: Sequence[str]) -> int:
    """Unpacks an app, and prints its SHA-256 to compare with the server's people; 2 if it can't."""
    parser = argparse.ArgumentParser(prog="python -m discreet.deployment.approve", description=__doc__)
    parser.add_argument("app", type=Path, nargs="?", help="a .fab file of the server's people (default: this folder's)")
    parser.add_argument("--folder", type=Path, default=Path("approved"), help="default: approved")
    given = parser.parse_args(words)
    try:
        # As `flwr run` sends it; the name of a file must be that of its content. An app that is there stays as it is.
        app = given.app or build_fab_from_disk(app_folder())
        place = install_from_fab(app, given.folder, skip_prompt=True)
        digest = hashlib.sha256(app if isinstance(app, bytes) else app.read_bytes()).hexdigest()
    except (click.ClickException, zipfile.BadZipFile, OSError, ValueError) as error:
        print(f"discreet: the app can't be approved: {error}", file=sys.stderr)
        return 2
    print(f"approved {place.name}, SHA-256 {digest}, in {place.parent.resolve()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
