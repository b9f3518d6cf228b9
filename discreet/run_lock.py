"""One writer for a run folder: a server that was thought dead must not write beside the one that took over."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from discreet.settings import ConfigError

logger = logging.getLogger("discreet")

LOCK_FILE = "lock"
PATIENCE_SECONDS = 30.0
LOOK_SECONDS = 0.2


@contextmanager
def only_writer(path: Path, *, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Holds a run folder while the block runs; makes it where it is missing. The lock ends with its process.

    A SuperLink that is killed leaves its ServerApp running for a moment: who resumes waits `patience` seconds for it.

    Raises:
      ConfigError: another process still holds the folder, or it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"output_dir={path} can't be used: {error.strerror}") from error
    try:
        _take(descriptor, path, patience)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, patience: float) -> None:
    deadline, told = time.monotonic() + patience, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"output_dir={path} is in use: another process is writing this run") from error
            if not told:
                logger.info("waiting for the process that still writes %s", path)
            told = True
            time.sleep(LOOK_SECONDS)
        else:
            return
