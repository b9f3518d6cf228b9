"""Modules that were imported before a fork, for a process whose app came with the very same files."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class KeptModules(MetaPathFinder, Loader):
    """Takes the modules of some packages out of `sys.modules`, and gives them to who imports one of them: all of them
    where each of their files stands in the importer's app byte for byte, none where one differs.

    So what runs is always the code that came with the run; it is just not compiled and executed again. The app's folder
    is the first on `sys.path` that has the package. Put it first on `sys.meta_path`.
    """

    def __init__(self, packages: Collection[str]) -> None:
        names = [name for name in sys.modules if name.split(".")[0] in packages]
        self.modules = {name: sys.modules.pop(name) for name in names}
        self.sources = {name: Path(str(module.__file__)).read_bytes() for name, module in self.modules.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Ours where the app's files are those that the kept modules were made from; else None, and Python goes on."""
        if fullname not in self.modules:
            return None
        folder = _folder_with(fullname.split(".")[0])
        if folder is None or not self._came_with(folder):
            self.modules = {}  # decided once: kept modules never meet modules of another app
            return None
        return ModuleSpec(fullname, self, loader_state=folder)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The one that was kept."""
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Runs nothing: that was done before. All kept modules are the app's from now on."""
        assert module.__spec__ is not None
        folder: Path = module.__spec__.loader_state
        for name, kept in self.modules.items():
            kept.__file__ = str(folder / self._place(name))
            if hasattr(kept, "__path__"):
                kept.__path__ = [str(folder.joinpath(*name.split(".")))]  # what else the package has is imported there
        sys.modules.update(self.modules)

    def _came_with(self, folder: Path) -> bool:
        places = {folder / self._place(name): source for name, source in self.sources.items()}
        return all(place.is_file() and place.read_bytes() == source for place, source in places.items())

    def _place(self, name: str) -> Path:
        place = Path(*name.split("."))
        return place / "__init__.py" if hasattr(self.modules[name], "__path__") else place.with_suffix(".py")


def _folder_with(package: str) -> Path | None:
    return next((Path(entry) for entry in sys.path if (Path(entry) / package).is_dir()), None)
