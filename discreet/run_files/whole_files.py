"""Files and folders that appear under their names as a whole: written beside, flushed, and then
renamed or linked. After a kill there is the old content, the new content, or nothing."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from discreet.ledger.rollback_guard import flush_to_disk, remove_database
from discreet.logs import json_ready

# In a folder that is being filled: what is not complete yet, and what moves up.
UNFINISHED = ".unfinished"
FINISHED = ".finished"


def replace_file(path: Path, content: bytes, *, flush: bool = True, mode: int = 0o666) -> None:
    """Replaces a file as a whole. After a crash the old or the new content is there, provided that
    the new one was flushed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # a part of it, on a full disk
    if flush:
        flush_to_disk(path.parent)


def write_json(path: Path, facts: Mapping[str, Any]) -> str:
    """Replaces a file by facts and returns its text. Infinity is written as the string "inf", which
    every JSON reader accepts."""
    text = json.dumps(json_ready(facts), indent=2) + "\n"
    replace_file(path, text.encode())
    return text


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """The name of a file beside `path`; what the block has written there, for its owner alone,
    becomes `path` at the block's end. FileExistsError: there is a file, which stays as it is."""
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        beside.touch(mode=0o600)
        yield beside
        flush_to_disk(beside)
        os.link(beside, path)  # unlike a rename, a link replaces no file
    finally:
        remove_database(beside)  # and SQLite's side files, if it is a ledger
    flush_to_disk(path.parent)


@contextmanager
def new_folder(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """An empty folder beside `path`, which becomes `path` at the block's end. What a killed process
    has left of it is removed first. FileExistsError: another process is making `path`. OSError:
    `path` is not empty, or can't be made."""
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir(mode=mode, exist_ok=True)
    except OSError as error:  # named after the folder that was asked for
        raise OSError(error.errno, error.strerror, str(path)) from error
    descriptor = os.open(beside, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a kill ends it
            if not os.path.samestat(os.stat(beside), os.fstat(descriptor)):
                raise FileNotFoundError(beside)
            _empty(beside)
        except (BlockingIOError, FileNotFoundError) as error:
            raise FileExistsError(f"another process is making {path}, or has made it") from error
        try:
            yield beside
            for file in beside.rglob("*"):
                flush_to_disk(file)
            flush_to_disk(beside)
            os.rename(beside, path)
        except BaseException:
            shutil.rmtree(beside)
            raise
    finally:
        os.close(descriptor)
    flush_to_disk(path.parent)


def fill_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Fills an empty folder, which stays the same one: a shell may be in it, or it may be a mount
    point. `fill` writes into a folder within it, whose files then move up. After a kill the call is
    given again. FileExistsError: the folder is not empty."""
    begun = path / UNFINISHED
    done = path / FINISHED
    if not done.exists():
        if any(each.name != UNFINISHED for each in path.iterdir()):
            raise FileExistsError(f"{path} is not empty")
        begun.mkdir(exist_ok=True)
        _empty(begun)
        fill(begun)
        for file in begun.rglob("*"):
            flush_to_disk(file)
        os.rename(begun, done)
        flush_to_disk(path)

    for each in sorted(done.iterdir()):
        os.rename(each, path / each.name)
    flush_to_disk(path)
    done.rmdir()


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
