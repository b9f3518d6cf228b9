"""The folder of a site that was split: its key, its blocks, and what it says of them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from discreet.settings.foreign_files import one_line
from discreet.settings.rules import ConfigError

KEY = "key"
SPLIT = "split.json"
BLOCKS = "blocks"


@dataclass(frozen=True)
class BlockSplit:
    """A split: the id column, the number of blocks, the number of patients at the time, and the
    SHA-256 digest of each block's archive."""

    id: str
    count: int
    patients: int
    digests: Sequence[str]


def read_split(folder: Path) -> BlockSplit:
    """The split of a site's folder. ConfigError: there is none. PermissionError: it is closed."""
    path = folder / SPLIT
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} has no split: make one with `discreet site split`") from error
    with one_line(path, ConfigError):
        return BlockSplit(**json.loads(content))


def read_blocks(folder: Path, *, id_column: str, count: int) -> tuple[Path, ...]:
    """The archives of the blocks that `split_site` made, by number. ConfigError: the split has
    other settings, blocks are missing or have changed, or other users can read them."""
    split = read_split(folder)
    check_split(split, folder, id_column=id_column, count=count)
    for path in (folder, folder / KEY, folder / BLOCKS):
        check_private(path)
    archives = tuple(folder / BLOCKS / f"{number:05d}.tar" for number in range(count))
    for path, digest in zip(archives, split.digests, strict=True):
        if not path.is_file():
            raise ConfigError(f"{folder}: block {path.name} is missing")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ConfigError(f"{folder}: block {path.name} differs from the one that was split")
    return archives


def check_split(split: BlockSplit, folder: Path, *, id_column: str, count: int) -> None:
    """Raises ConfigError if a split was made with other settings."""
    if (split.id, split.count) != (id_column, count):
        made = f"id {split.id!r} into {counted(split.count)}"
        raise ConfigError(f"{folder} was split by {made}, not by {id_column!r} into {count}")


def counted(blocks: int) -> str:
    """A number of blocks, in words."""
    return f"{blocks} block{'s' * (blocks != 1)}"


def marks_of(archives: Sequence[Path]) -> list[tuple[int, ...]]:
    """The marks of files by which a change of any of them is noticed. FileNotFoundError: one is
    missing."""
    found = [path.stat() for path in archives]
    return [(each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found]


def check_private(path: Path) -> None:
    """Raises ConfigError unless a path belongs to this user and no other user can read it."""
    status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path} must belong to this user and be closed to all others (chmod go= {path})"
        )


def archive_of(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of files. Equal files give an equal archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return buffer.getvalue()
