"""The ServerApp that Flower's bundle holds: it runs the server's own installed code, and takes
nothing from the bundle.

The bundle goes to every node, so it holds what a client runs, this file, and nothing else
(`fab-include` in pyproject.toml). A node runs the bundle's code. The server runs what is installed
on it, and refuses a bundle with any other code: both sides then run the same code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

BUNDLE = Path(__file__).resolve().parent.parent
SERVER_FILE = Path("server_app", "server_app.py")  # no bundle has it

app = ServerApp()


class OtherCodeError(Exception):
    """The server has other code installed than the bundle holds, or none. The message says
    which."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run by the installed code."""
    try:
        use_installed(BUNDLE, sys.path)
    except OtherCodeError as error:
        from discreet.protocol.run_end import (
            end_run,
        )  # here alone from the bundle: nothing else runs after it

        end_run(grid, error)
    from server_app.server_app import main as run_installed

    run_installed(grid, context)


def use_installed(bundle: Path, search: Sequence[str]) -> None:
    """Lets this process import everything from what is installed here, instead of the bundle.

    A checkout on the path holds the library and the app side by side; a wheel holds the app in
    discreet/app.

    Raises:
      OtherCodeError: nothing is installed, or a file of the bundle is not the installed one, byte
        for byte.
    """
    found = next(filter(None, map(_homes, search)), None)
    if found is None:
        raise OtherCodeError(
            "discreet is not installed where the ServerApp runs: pip install it there, once"
        )
    library, app_home = found

    def installed(place: Path) -> Path:
        return (library if place.parts[:1] == ("discreet",) else app_home) / place

    for path in sorted(bundle.rglob("*.py")):
        own = installed(path.relative_to(bundle))
        if not own.is_file() or own.read_bytes() != path.read_bytes():
            raise OtherCodeError(
                f"{path.relative_to(bundle)} of this run is not the one installed in {library}: "
                "start the run from a checkout of the code that the server has, or install this "
                "code on the server"
            )
    sys.path[:0] = dict.fromkeys((str(library), str(app_home)))
    rest = Rest(bundle, installed)
    sys.meta_path.append(rest)
    packages = {place.name for place in bundle.iterdir()}
    for module in [
        module for name, module in sys.modules.copy().items() if name.split(".")[0] in packages
    ]:
        # Packages that were imported from the bundle so far: their other modules are in the
        # installed one.
        if places := rest.installed_places(getattr(module, "__path__", ())):
            module.__path__ = places


@dataclass(frozen=True)
class Rest:
    """Finds the modules that the bundle lacks, for packages that are imported from it all the same.

    In a simulation another thread imports the ClientApp at the same time, and may be in the middle
    of a package.
    """

    bundle: Path
    installed: Callable[[Path], Path]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`; asked last."""
        places = self.installed_places(path or ())
        return PathFinder.find_spec(name, places) if places else None

    def installed_places(self, entries: Iterable[str]) -> list[str]:
        """The installed places of those entries of a path that lie in the bundle."""
        places = [Path(entry).resolve() for entry in entries]
        return [
            str(self.installed(place.relative_to(self.bundle)))
            for place in places
            if place.is_relative_to(self.bundle)
        ]


def _homes(entry: str) -> tuple[Path, Path] | None:
    """The folders of the library and the app below an entry of the path; None if they are not
    there."""
    folder = Path(entry).resolve()
    for app_home in (folder, folder / "discreet" / "app"):
        if (app_home / SERVER_FILE).is_file():
            return folder, app_home
    return None
