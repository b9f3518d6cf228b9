"""Stops a command in a fork at each change that it makes to files, one after the other, as a kill
would."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

STOPPED = 77
CHANGES = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
Work = Callable[[Path], object]


def every_stop(
    prepare: Work, work: Work, folder: Path, *, step: int = 1
) -> Iterator[tuple[int, Path]]:
    """Every number of a change at which `work` is stopped, or one in `step`, each with the folder
    that it left. The changes are those of files below a folder that `prepare` has filled. Ends with
    the first number that is more than `work` makes."""
    number = 1
    while True:
        place = folder / f"stop{number}" / "place"
        place.mkdir(parents=True)
        prepare(place)
        code = in_fork(partial(_stopped, work, place, number))
        if code != STOPPED:
            assert code == 0
            return
        yield number, place
        number += step


def in_fork(work: Callable[[], object]) -> int | None:
    """The exit code of a fork of this process that does some work."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_quiet, args=(work,))
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads. The child takes none of this process's locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(120)
    return process.exitcode


def _quiet(work: Callable[[], object]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = work()
    if code:
        raise SystemExit(code)


def _stopped(work: Work, place: Path, number: int) -> object:
    """Works, and ends the process at a change of a file below `place`, before it is made."""
    left = number
    begins = str(place.resolve())
    fsync = os.fsync

    def count() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            written = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            written = event in CHANGES
        if not written or not arguments or not os.fsdecode(str(arguments[0])).startswith(begins):
            return
        if count():
            if event == "open":  # a kill finds the file open, and nothing written
                os.close(os.open(arguments[0], os.O_CREAT | os.O_WRONLY | arguments[2], 0o600))
            os._exit(STOPPED)

    def flushed(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(begins) and count():
            os._exit(STOPPED)
        fsync(descriptor)

    sys.addaudithook(look)
    os.fsync = flushed
    return work(place)


def visible(folder: Path) -> list[str]:
    """The names in a folder that are not hidden, sorted."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def same_files(one: Path, other: Path) -> bool:
    """True if two folders have the same files, with the same contents."""
    found = [
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (one, other)
    ]
    return found[0] == found[1]


if not Path("/proc/self/fd").is_dir():
    pytest.skip("there is no /proc", allow_module_level=True)
