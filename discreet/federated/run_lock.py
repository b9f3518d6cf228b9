"""One writer for a run folder: a server that was thought dead must not write beside the one that took over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from discreet.settings import ConfigError

logger = logging.getLogger("discreet")

LOCK_FILE = "lock"
PATIENCE_SECONDS = 30.0


@contextmanager
def only_writer(path: Path, *, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Holds a run folder while the block runs; makes it if it is missing. The lock ends with its process.

    A SuperLink that is killed leaves its ServerApp running for a moment, so whoever resumes waits `patience` seconds.

    Raises:
      ConfigError: another process still holds the folder, or it can't be made.
    """
    lock = FileLock(path / LOCK_FILE, thread_local=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _take(lock, path, patience)
    except OSError as error:
        raise ConfigError(f"output_dir={path} can't be used: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _take(lock: FileLock, path: Path, patience: float) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for the process that still writes %s", path)
        try:
            lock.acquire(timeout=patience)
        except Timeout as error:
            raise ConfigError(f"output_dir={path} is in use: another process is writing this run") from error
