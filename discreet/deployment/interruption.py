"""Interruption of a command by Ctrl-C, SIGTERM, or the loss of its terminal or of the reader of its
output (`| head`): it is noted in the run's files, and one line says how to resume."""

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
from discreet.run_files.opening import only_writer, output_folder
from discreet.run_files.run_folder import CONFIG, RunFolder, note_interruption
from discreet.settings.rules import ConfigError
from discreet.simulation.processes import RunLostError, heard

logger = logging.getLogger("discreet")

LOCK_SECONDS = 5.0  # a killed process holds its files a moment longer
PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)  # text that Hydra reads without quotes


class AskedToEnd(KeyboardInterrupt):
    """A signal asked this process to end; the argument is its number. As a KeyboardInterrupt it is
    not taken for a failure, and it interrupts Ray's waiting, which drops other exceptions of signal
    handlers."""


@contextmanager
def ending(tell: Callable[[str], str]) -> Iterator[None]:
    """A context that ends the process if it is asked to end, after the block has cleaned up and
    `tell` has updated files; `tell` gives the line to log for a reason. The exit code is 128 plus
    the number of the signal, 141 if nobody reads the output, and 1 if the run was lost, for
    instance to a full disk. Any other error is raised again, and `tell` is called for it unless a
    setting is wrong."""
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
        # Any error, because one during clean-up, for instance at a lost terminal, would hide the
        # signal.
        error = asked[0] if asked else raised
        reason = str(error) or type(error).__name__
        if isinstance(error, AskedToEnd):
            reason = f"ended by {signal.Signals(error.args[0]).name}"
            code = 128 + error.args[0]
        elif isinstance(error, BrokenPipeError):
            log_to(sys.stderr)
            reason = "the output is no longer read"
            code = 128 + signal.SIGPIPE
        elif isinstance(error, OSError | RunLostError):
            code = 1
        else:
            if isinstance(error, Exception) and not isinstance(error, ConfigError):
                tell(reason)
            raise
        logger.warning("%s", tell(reason))
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            # Output without a reader would cause another traceback when Python ends.
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def resumable(folder: RunFolder, *program: str) -> Iterator[None]:
    """As `ending`, for a run of a program with a setting `resume=true`."""
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
    return f"interrupted after round {done} ({reason}); to resume: {command}"


def not_begun(reason: str, folder: RunFolder | None = None) -> str:
    """The line to log if a command is interrupted before it has begun. `folder`: that of the runs
    that it would resume."""
    if folder is not None and any(folder.path.rglob("*.db")):
        return (
            f"interrupted before the run continued ({reason}): what was spent before is recorded "
            f"in {folder.path}"
        )
    return (
        f"interrupted before the run began ({reason}): nothing was spent, and the same command "
        "starts it again"
    )


def folder_in(words: Sequence[str]) -> RunFolder | None:
    """The run folder in overrides; None if there is none."""
    named = [word.partition("=")[2] for word in words if word.startswith("output_dir=")]
    if named:
        return RunFolder(output_folder(named[-1].strip("'\"")))
    return None


def interrupt_below(folder: Path, what_next: str, reason: str) -> str:
    """Notes the interruption in all unfinished runs directly below a folder."""
    for config in sorted(folder.glob("*/config.yaml")):
        note_interruption(RunFolder(config.parent), reason)
    return f"interrupted ({reason}); {what_next}"


def override(name: str, path: Path) -> str:
    """An override that sets a path, quoted for Hydra.

    >>> override("output_dir", Path("/runs/one")), override("output_dir", Path("/runs/the first"))
    ('output_dir=/runs/one', 'output_dir="/runs/the first"')
    """
    text = str(path)
    return f"{name}={text if PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)}"
