"""Handles Ctrl-C while a command is still being imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ends_at_once() -> Iterator[None]:
    """A context in which Ctrl-C ends this process at once. Nothing needs cleaning up yet, and an
    extension module may turn an exception during its import into another error, or print a
    traceback."""
    before = signal.getsignal(signal.SIGINT)
    # Not if this process was started with Ctrl-C ignored.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say_ended() -> int:
    """Prints that Ctrl-C has ended the command, and returns its exit code."""
    print("discreet: ended by Ctrl-C", file=sys.stderr, flush=True)
    return 128 + signal.SIGINT


def _end(number: int, frame: object) -> NoReturn:
    os._exit(say_ended())
