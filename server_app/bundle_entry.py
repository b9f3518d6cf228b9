"""The ServerApp that Flower's bundle holds: it runs the server's own installed code, and takes nothing from the bundle.

The bundle goes to every node, so it holds what a client runs, this file, and nothing else (`fab-include` in
pyproject.toml). A node runs the bundle's code. The server runs what is installed on it, and refuses a bundle with any
other code: both sides then run the same code.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.superlink.grid import InMemoryGrid

BUNDLE = Path(__file__).resolve().parent.parent
SERVER_FILE = Path("server_app", "server_app.py")  # no bundle has it

app = ServerApp()


class OtherCodeError(Exception):
    """The server has other code installed than the bundle holds, or none. The message says which."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run by the installed code."""
    try:
        use_installed(BUNDLE, sys.path)
    except OtherCodeError as error:
        _end(grid, error)
    from server_app.server_app import ENDS
    from server_app.server_app import main as run_installed

    try:
        run_installed(grid, context)
    except ENDS as error:
        _end(grid, error)


def _end(grid: Grid, error: Exception) -> NoReturn:
    # One line in the run's log, then the end of this process and of the run.
    logging.getLogger("discreet").error("discreet: %s", error)
    if isinstance(grid, InMemoryGrid):
        raise SystemExit(2) from error
    # A SuperLink learns of a plain exit only when the heartbeats stay away, a minute later.
    flwr_exit(ExitCode.SERVERAPP_EXCEPTION, str(error))


def use_installed(bundle: Path, search: Sequence[str]) -> None:
    """Lets this process import everything from the package that is installed here, instead of the bundle.

    Raises:
      OtherCodeError: none is installed, or a file of the bundle is not that of the package, byte for byte.
    """
    folders = [Path(entry).resolve() for entry in search]
    installed = next((folder for folder in folders if (folder / SERVER_FILE).is_file()), None)
    if installed is None:
        raise OtherCodeError("discreet is not installed where the ServerApp runs: pip install it there, once")
    for path in sorted(bundle.rglob("*.py")):
        own = installed / path.relative_to(bundle)
        if not own.is_file() or own.read_bytes() != path.read_bytes():
            raise OtherCodeError(
                f"{path.relative_to(bundle)} of this run is not the one installed in {installed}: start the run from a "
                "checkout of the code that the server has, or install this code on the server"
            )
    sys.path.insert(0, str(installed))
    packages = {place.name for place in bundle.iterdir()}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] in packages]:
        # Packages that were imported from the bundle so far: their other modules are in the installed one.
        places = [Path(entry).resolve() for entry in getattr(module, "__path__", ())]
        if any(place.is_relative_to(bundle) for place in places):
            module.__path__ = [str(installed / place.relative_to(bundle)) for place in places]
