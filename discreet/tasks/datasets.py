"""Data sets by name: each a function of a path (or None) that gives a Task, loading libraries when called."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from discreet.tasks.examples import Examples, Task
from discreet.tasks.folder import FOLDER, load_folder
from discreet.tasks.images import load_cifar10, load_fashion_mnist, load_femnist, load_mnist
from discreet.tasks.tabular import load_breast_cancer, load_digits
from discreet.tasks.text import load_shakespeare

__all__ = ["DATASETS", "Examples", "Task", "load_task"]

DATASETS: dict[str, Callable[[str | None], Task]] = {
    "digits": load_digits,
    "breast_cancer": load_breast_cancer,
    "mnist": load_mnist,
    "fashion_mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
    "femnist": load_femnist,
    "shakespeare": load_shakespeare,
    FOLDER: load_folder,
}


@lru_cache(maxsize=4)
def load_task(name: str, *, path: str | None = None) -> Task:
    """The data set `name`, from `path` where it reads local files; loaded once per process.

    Raises ValueError for an unknown name or a path that the data set does not read, FileNotFoundError where
    files are missing, with what was expected and where.
    """
    if name not in DATASETS:
        raise ValueError(f"data.name: no data set {name!r}; known are {', '.join(sorted(DATASETS))}")
    return DATASETS[name](path)
