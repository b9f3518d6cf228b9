"""The scratch folder of an app that may be hostile, where no namespace removes it: measures and
removes its contents.

The next block must neither wait for either nor find anything left behind. Every file or folder
counts for some bytes, whatever its content, because removing it takes time. Neither operation uses
recursion or long paths.
"""

from __future__ import annotations

import itertools
import os
import secrets
from contextlib import suppress
from pathlib import Path

LEAST_BYTES = 1 << 14  # that each file and folder counts for
MOST_DEPTH = 64
BLOCK = 512  # bytes of a unit of `st_blocks`
MEGABYTE = 1 << 20
OTHERS_MB = 1024  # that other programs may write while a block runs


class WatchedFolder:
    """The scratch folder of a running block, and the room on its disk.

    Files that have no name any more are in no folder. They show only in the free space of the disk,
    which other programs use too.
    """

    def __init__(self, folder: Path, most_mb: float) -> None:
        self.folder = folder
        self.most_mb = most_mb
        self.least_free_mb = free_mb(folder) - most_mb - OTHERS_MB

    def exceeded(self) -> str:
        """The limit that the block has exceeded, in words, or nothing."""
        if holds_more(self.folder, self.most_mb):
            return f"it held more than limits.disk-mb = {self.most_mb:g}"
        if free_mb(self.folder) < self.least_free_mb:
            return f"the free space of the disk fell by more than {self.most_mb + OTHERS_MB:g} MB"
        return ""


def holds_more(folder: Path, most_mb: float) -> bool:
    """True if a folder holds more megabytes, or folders that can't be inspected because they are
    closed or nested too deeply."""
    left = most_mb * MEGABYTE
    folders = [(str(folder), 0)]
    while folders:
        where, depth = folders.pop()
        try:
            sizes, inner = _looked_at(where)
        except FileNotFoundError:  # it has gone in the meantime
            continue
        except OSError:
            return True
        left -= sizes
        folders += [(each, depth + 1) for each in inner]
        if left < 0 or depth > MOST_DEPTH:
            return True
    return False


def _looked_at(where: str) -> tuple[int, list[str]]:
    """The bytes of the entries in one folder, and its subfolders."""
    size = 0
    inner = []
    with os.scandir(where) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                size += max(LEAST_BYTES, entry.stat(follow_symlinks=False).st_blocks * BLOCK)
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.path)
    return size, inner


def free_mb(folder: Path) -> float:
    """The free megabytes in a folder's file system: unnamed files use them too."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize / MEGABYTE


def remove(folder: Path) -> None:
    """Removes a folder and all its contents, however deep, by moving subfolders up first. No
    process may be writing to it."""
    prefix = secrets.token_hex(16)
    names = (f"{prefix}-{number}" for number in itertools.count())
    while inner := list(os.scandir(folder)):
        for entry in inner:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for below in list(os.scandir(entry.path)):
                if below.is_dir(follow_symlinks=False):
                    os.chmod(below.path, 0o700)
                    os.rename(below.path, folder / next(names))
                else:
                    os.unlink(below.path)
            os.rmdir(entry.path)
    os.rmdir(folder)
