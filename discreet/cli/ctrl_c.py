"""A Ctrl-C while a command is still being imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ends_at_once() -> Iterator[None]:
    """A Ctrl-C in the block ends this process at once: nothing has begun that would need cleaning
    up, and an extension may turn an exception during its import into another error, or print a
    traceback of its own."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if this process was started with Ctrl-C ignored
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say_ended() -> int:
    """Says that Ctrl-C has ended the command, and gives its exit code."""
    print("discreet: ended by Ctrl-C", file=sys.stderr, flush=True)
    return 128 + signal.SIGINT


def _end(number: int, frame: object) -> NoReturn:
    os._exit(say_ended())
