"""The end of a command before it is done, by Ctrl-C, SIGTERM, the loss of its terminal, or of
whoever reads its output (`| head`): files that say so, and one line that tells how to go on."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from discreet.logs import log_to
from discreet.run_files.run_folder import (
    CONFIG,
    RunFolder,
    note_interruption,
    only_writer,
    output_folder,
)
from discreet.settings.rules import ConfigError
from discreet.simulation.processes import RunLostError, heard

logger = logging.getLogger("discreet")

LOCK_SECONDS = 5.0  # a process that was killed holds its files a moment longer
PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)  # what Hydra reads as it stands


class AskedToEnd(KeyboardInterrupt):
    """A signal asked this process to end. Nothing on the way takes it for a failure, and Ray, which
    drops whatever else a signal raises while it waits, ends its waiting. Its argument is the number
    of the signal."""


@contextmanager
def ending(tell: Callable[[str], str]) -> Iterator[None]:
    """Ends the process, if it is asked to end while the block runs, after the block has cleaned up
    and `tell` has put files right, which gives the one line to log for a reason. The exit code is
    128 and the number of the signal, 141 if nobody reads the output, 1 if the run was lost, for
    instance to a full disk."""
    asked: list[AskedToEnd] = []

    def ask(number: int, _: object) -> NoReturn:
        asked.append(AskedToEnd(number))
        raise asked[0]

    before = {number: signal.signal(number, ask) for number in heard()}
    try:
        yield
    except BaseException as raised:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        # what is raised on the way out, to a lost terminal, hides what was asked
        error = asked[0] if asked else raised
        if isinstance(error, AskedToEnd):
            reason = f"ended by {signal.Signals(error.args[0]).name}"
            code = 128 + error.args[0]
        elif isinstance(error, BrokenPipeError):
            log_to(sys.stderr)
            reason = "the output is no longer read"
            code = 128 + signal.SIGPIPE
        elif isinstance(error, OSError | RunLostError):
            reason = str(error) or type(error).__name__
            code = 1
        else:
            raise
        logger.warning("%s", tell(reason))
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (
                OSError
            ):  # output that nobody can read would make a traceback of its own when Python ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def resumable(folder: RunFolder, *program: str) -> Iterator[None]:
    """As `ending`, for a run of a program that takes `resume=true`."""
    command = [*program, "resume=true", override("output_dir", folder.path)]
    with ending(partial(_interrupt, folder, shlex.join(command))):
        yield


def _interrupt(folder: RunFolder, command: str, reason: str) -> str:
    if not (folder.path / CONFIG).exists():
        return not_begun(reason, folder)
    try:
        with only_writer(folder.path, patience=LOCK_SECONDS):
            done = note_interruption(folder, reason)
    except ConfigError as error:
        return f"{reason}; {error}"
    return f"interrupted after round {done} ({reason}); to go on: {command}"


def not_begun(reason: str, folder: RunFolder | None = None) -> str:
    """The line as long as a command has not begun. `folder`: of the run, or of the runs, that it
    would go on with."""
    if folder is not None and any(folder.path.rglob("*.db")):
        return (
            f"interrupted before the run went on ({reason}): what was spent before is recorded in "
            f"{folder.path}"
        )
    return (
        f"interrupted before the run began ({reason}): nothing was spent, and the same command "
        "starts it again"
    )


def folder_in(words: Sequence[str]) -> RunFolder | None:
    """The run folder that overrides name; None if they name none."""
    named = [word.partition("=")[2] for word in words if word.startswith("output_dir=")]
    if named:
        return RunFolder(output_folder(named[-1].strip("'\"")))
    return None


def interrupt_below(folder: Path, what_next: str, reason: str) -> str:
    """Notes the interruption of the runs directly below a folder, as far as they have begun and are
    not over."""
    for config in sorted(folder.glob("*/config.yaml")):
        note_interruption(RunFolder(config.parent), reason)
    return f"interrupted ({reason}); {what_next}"


def override(name: str, path: Path) -> str:
    """A setting that is a path, as Hydra reads it back.

    >>> override("output_dir", Path("/runs/one")), override("output_dir", Path("/runs/the first"))
    ('output_dir=/runs/one', 'output_dir="/runs/the first"')
    """
    text = str(path)
    return f"{name}={text if PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)}"
