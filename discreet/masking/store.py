"""Where a node keeps its state between two messages, so that a process that starts anew answers nothing twice."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from discreet.masking.agreement import MaskingRefused

_CHECK_BYTES = 32


class Store(Protocol):
    """A place for one node's state, by run."""

    def locked(self, run: str) -> AbstractContextManager[None]:
        """A context: nobody else has the state of this run meanwhile."""

    def load(self, run: str) -> bytes | None:
        """What was saved last; None if nothing was."""

    def save(self, run: str, state: bytes) -> None:
        """Keeps `state` in place of what was there; when it returns the state is safe from a crash."""


@dataclass(frozen=True)
class MemoryStore:
    """State of a node that lives as long as its process: for virtual clients and tests."""

    states: dict[str, bytes] = field(default_factory=dict, repr=False)

    @contextmanager
    def locked(self, run: str) -> Iterator[None]:
        """One process, one caller at a time: nothing to do."""
        yield

    def load(self, run: str) -> bytes | None:
        """What was saved last."""
        return self.states.get(run)

    def save(self, run: str, state: bytes) -> None:
        """Keeps it."""
        self.states[run] = state


@dataclass(frozen=True)
class FolderStore:
    """A folder of the node's owner, which nobody else can read: a file for each run, replaced whole and fsynced.

    Secrets of a round are gone from the file once the round is over; whether the disk keeps old blocks is the disk's
    matter. A copy of the folder that is put back later lets the node answer twice: no backup of it is of any use.
    """

    folder: Path

    @contextmanager
    def locked(self, run: str) -> Iterator[None]:
        """Refuses while another process answers for the same node.

        Raises:
          MaskingRefused: that is so, or the folder can't be written.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path(run, ".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MaskingRefused(f"the node's state can't be kept: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise MaskingRefused("another process is answering for this node") from error
        finally:
            os.close(handle)

    def load(self, run: str) -> bytes | None:
        """What was saved last.

        Raises:
          MaskingRefused: the file is damaged.
        """
        try:
            data = self._path(run, ".state").read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data[_CHECK_BYTES:]).digest() != data[:_CHECK_BYTES]:
            raise MaskingRefused("the node's state of this run is damaged, so that it can't know what it has answered")
        return data[_CHECK_BYTES:]

    def save(self, run: str, state: bytes) -> None:
        """Writes a file beside it, syncs it, puts it in its place, and syncs the folder.

        Raises:
          MaskingRefused: that can't be done.
        """
        try:
            self._replace(run, state)
        except OSError as error:
            raise MaskingRefused(f"the node's state can't be kept: {error.strerror}") from error

    def _replace(self, run: str, state: bytes) -> None:
        path, new = self._path(run, ".state"), self._path(run, ".new")
        with os.fdopen(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(hashlib.sha256(state).digest() + state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _path(self, run: str, ending: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{32}", run):
            raise MaskingRefused("a run that is not 32 hexadecimal digits")
        return self.folder / f"{run}{ending}"
