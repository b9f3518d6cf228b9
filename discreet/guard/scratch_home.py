"""The folder in which a sandbox without namespaces keeps the scratch folders of its blocks.

It has a name by which a later guard finds it. All processes of the sandbox but the blocks hold its
lock: a folder whose lock is free was left by a guard that somebody has killed. It is not in
/dev/shm: in a tmpfs the number of a new file tells a block how many others have made (`site check`
reads all levels there, and none in ext4).
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from discreet.guard.scratch import remove
from discreet.settings.rules import ConfigError

PLACE = Path("/tmp")
NAME = "discreet-guard-"


@dataclass(frozen=True)
class ScratchHome:
    """The folder of a sandbox, and the open file whose lock says that it is in use."""

    folder: Path
    lock: int

    @classmethod
    def new(cls) -> Self:
        """A new folder for this user alone."""
        while True:
            folder = Path(tempfile.mkdtemp(prefix=NAME, dir=PLACE))
            lock = _locked(folder)
            if lock is not None and folder.exists():
                return cls(folder, lock)
            # another guard has found it before it was locked

    def leave(self) -> None:
        """Gives up the folder. It is removed, unless a process of the sandbox is still in it."""
        os.close(self.lock)
        _remove_unlocked(self.folder)


def remove_left() -> None:
    """Removes what guards of this user have left that have ended, with all their keepers.
    ConfigError: it can't be removed, since a process of a block still writes to it."""
    for folder in _homes():
        try:
            _remove_unlocked(folder)
        except OSError as error:
            raise ConfigError(
                f"{folder} is left of a guard that was killed, and can't be removed: end the "
                f"processes that were its blocks ({error.strerror})"
            ) from error


def _homes() -> Iterator[Path]:
    """The folders of sandboxes of this user; another user may give any name to a folder of its
    own."""
    for folder in PLACE.glob(f"{NAME}*"):
        with suppress(FileNotFoundError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                yield folder


def _remove_unlocked(folder: Path) -> None:
    lock = _locked(folder)
    if lock is None:
        return
    try:
        with suppress(FileNotFoundError):  # somebody else removed it before it was locked
            remove(folder)
    finally:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """An open file with the lock of a folder; None if another process has it, or the folder is
    gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
