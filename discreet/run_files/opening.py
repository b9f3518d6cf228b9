"""Opening a run folder: its path, the check that a call may use it, and the lock of its writer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.call import Call
from discreet.run_files.run_folder import CONFIG, RunFolder
from discreet.settings.rules import ConfigError
from discreet.settings.wording import Key, Wording

LOCK = "lock"  # in a run folder
LOCK_SECONDS = 30.0
IN_USE = (
    "output_dir={path} is in use: another process is writing this run. A SuperLink that was killed "
    "starts its accepted runs again with it: `flwr list` shows its runs, `flwr stop` ends one"
)

logger = logging.getLogger("discreet")


def output_folder(output_dir: str | None) -> Path:
    """The absolute path of a run folder, named after the current time if none is given."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S_%f")
    return Path(output_dir or f"outputs/{stamp}").expanduser().resolve()


def check_output(call: Call, *, locked: bool = False) -> RunFolder:
    """The run folder of a call, with an absolute path; it is not created. `locked`: this process
    has its lock. ConfigError: `output_dir` holds a run already and `resume` is off, another process
    writes it, or there is nothing to resume."""
    folder = RunFolder(output_folder(call.output_dir))
    there = holds_run(folder)
    if call.resume and not there:
        nothing = f", but output_dir={folder.path} does not contain a run"
        raise ConfigError(Wording(Key("resume=true"), nothing))
    if there and not call.resume:
        if not locked and has_writer(folder.path):
            raise ConfigError(IN_USE.format(path=folder.path))
        taken = f"output_dir={folder.path} contains a run already: "
        raise ConfigError(Wording(taken, Key("resume=true"), " resumes it"))
    return folder


def holds_run(folder: RunFolder) -> bool:
    """True if a folder has a run to resume: its settings, or a ledger with a row. A run that was
    killed while it began left a ledger without one."""
    path = folder.ledger_path
    if (folder.path / CONFIG).exists():
        return True
    return path.exists() and DurableLedger(path).position().rows > 0


def has_writer(path: Path) -> bool:
    """True if a process of this machine holds the lock of a run folder, or it can't be told."""
    if not (path / LOCK).exists():
        return False
    try:
        with FileLock(path / LOCK, timeout=0):
            return False
    except (Timeout, OSError):  # OSError: of another user
        return True


@contextmanager
def only_writer(path: Path, *, patience: float = LOCK_SECONDS) -> Iterator[None]:
    """Locks a run folder while the block runs; creates it if it is missing. The lock ends with its
    process. A SuperLink that is killed leaves its ServerApp running for a moment, so a resumed run
    waits `patience` seconds. ConfigError: another process still holds the folder, or it can't be
    created."""
    lock = FileLock(path / LOCK, thread_local=False)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for the process that still writes %s", path)
            lock.acquire(timeout=patience)
    except Timeout as error:
        raise ConfigError(IN_USE.format(path=path)) from error
    except OSError as error:
        raise ConfigError(f"output_dir={path} can't be used: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def warn_of_readers(path: Path) -> None:
    """Warns if a folder that was there before its run is open to other users of the machine."""
    if path.stat().st_mode & 0o077:
        logger.warning(
            "other users of this machine can read %s, and its exact numbers of clients are not "
            "covered: chmod 700 it, or give an output_dir that does not exist yet",
            path,
        )
