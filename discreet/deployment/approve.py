"""The code that a node may run: `python -m discreet.deployment.approve` puts this checkout's app in a folder for it.

A SuperLink sends its nodes the code of each run. A node whose folder of apps can't be written runs what its owner put
there, and refuses everything else: see docker-compose.node.yml.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from discreet.deployment.flower_home import flower_environment
from discreet.settings.places import app_folder
from discreet.settings.rules import ConfigError


def build_app(folder: Path, *, source: Path) -> Path:
    """An app as one file (a FAB) in `folder`, as `flwr run` would send it."""
    command = ["flwr", "build", "--app", str(source)]
    subprocess.run(command, cwd=folder, env=flower_environment(folder), check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.fab")
    return built


def approve(app: Path, folder: Path) -> str:
    """Unpacks an app into `folder`/apps; gives its SHA-256, the first 8 digits of which Flower puts into its name."""
    environment = flower_environment(folder.resolve())
    # "n": an app that is there already stays as it is.
    subprocess.run(["flwr", "install", str(app)], env=environment, check=True, input=b"n\n", stdout=subprocess.DEVNULL)
    return hashlib.sha256(app.read_bytes()).hexdigest()


def main(words: Sequence[str]) -> int:
    """Approves, and prints the hash to compare with the server's people; 2 if it can't."""
    parser = argparse.ArgumentParser(prog="python -m discreet.deployment.approve", description=__doc__)
    parser.add_argument("app", type=Path, nargs="?", help="a .fab file of the server's people (default: this folder's)")
    parser.add_argument("--folder", type=Path, default=Path("approved"), help="default: approved")
    arguments = parser.parse_args(words)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            app = arguments.app or build_app(Path(scratch), source=app_folder())
            digest = approve(app, arguments.folder)
        print(f"approved {app.name}, SHA-256 {digest}, in {arguments.folder.resolve() / 'apps'}")
    except (subprocess.CalledProcessError, OSError, ConfigError) as error:
        print(f"discreet: the app can't be approved: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
