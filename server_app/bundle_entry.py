"""The ServerApp in Flower's bundle: it runs the server's own installed code, and nothing from the
bundle.

The bundle goes to every node, so it holds only the client's code and this file (`fab-include` in
pyproject.toml). A node runs the bundle's code. The server runs its installed code, and refuses a
bundle with any other code, so that both sides run the same code.
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
SERVER_FILE = Path("server_app", "server_app.py")  # not in any bundle

app = ServerApp()


class OtherCodeError(Exception):
    """The installed code of the server differs from the bundle's, or is missing. The message says
    which."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the installed code."""
    try:
        use_installed(BUNDLE, sys.path)
    except OtherCodeError as error:
        # The only import from the bundle; nothing else runs after it.
        from discreet.protocol.run_end import end_run

        end_run(grid, error)
    from server_app.server_app import main as run_installed

    run_installed(grid, context)


def use_installed(bundle: Path, search: Sequence[str]) -> None:
    """Makes this process import everything from the installed code instead of the bundle.

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
        # For packages that were already imported from the bundle, further modules come from the
        # installed ones.
        if places := rest.installed_places(getattr(module, "__path__", ())):
            module.__path__ = places


@dataclass(frozen=True)
class Rest:
    """Finds modules that the bundle lacks, for packages that are imported from it nevertheless.

    In a simulation another thread imports the ClientApp at the same time, and may be in the middle
    of a package.
    """

    bundle: Path
    installed: Callable[[Path], Path]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder.find_spec`; this finder is the last one."""
        places = self.installed_places(path or ())
        return PathFinder.find_spec(name, places) if places else None

    def installed_places(self, entries: Iterable[str]) -> list[str]:
        """The installed counterparts of path entries inside the bundle."""
        places = [Path(entry).resolve() for entry in entries]
        return [
            str(self.installed(place.relative_to(self.bundle)))
            for place in places
            if place.is_relative_to(self.bundle)
        ]


def _homes(entry: str) -> tuple[Path, Path] | None:
    """The folders of the library and the app below an entry of the path; None if they are
    missing."""
    folder = Path(entry).resolve()
    for app_home in (folder, folder / "discreet" / "app"):
        if (app_home / SERVER_FILE).is_file():
            return folder, app_home
    return None
