"""Discreet's log: plain lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

LOG_FORMATS = ("text", "json")
LOG_FORMAT_VARIABLE = "DISCREET_LOG_FORMAT"
FULL = (errno.ENOSPC, errno.EDQUOT)
LOST = "the output can't be written, and is lost from here on"
FIELDS = (
    "fields"  # logger.info("...", extra={FIELDS: {...}}): values beside the message, in JSON only
)


def json_ready(value: Any) -> Any:
    """The same value with infinity and NaN, which JSON has no numbers for, as the strings "inf",
    "-inf" and "nan".

    >>> json_ready({"epsilon": [math.inf, 2.5]})
    {'epsilon': ['inf', 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(name): json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def json_line(record: logging.LogRecord) -> str:
    """A record as one JSON object with time (UTC), level, logger, message, and its `fields`.

    >>> fields = {"msg": "hello", "levelname": "INFO", "name": "discreet", FIELDS: {"round": 1}}
    >>> record = logging.makeLogRecord(fields)
    >>> sorted(json.loads(json_line(record)))
    ['level', 'logger', 'message', 'round', 'time']
    """
    entry: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname,
        "logger": record.name,
        "message": record.getMessage(),
    }
    entry = json_ready(getattr(record, FIELDS, {})) | entry
    if record.exc_info:
        entry["exception"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(entry, default=str)


def log_to(stream: TextIO, *, log_format: str | None = None, name: str = "discreet") -> None:
    """Sends the log of Discreet to a stream, whatever else is configured.

    Args:
      stream: of text.
      log_format: `text`, one plain line for each message, or `json`; None takes the environment
        variable DISCREET_LOG_FORMAT, and `text` without one.
      name: of the logger, and of those below it.

    If the stream is a pipe that nobody reads any more, logging raises BrokenPipeError. If its disk
    is full, one line on standard error says so, and what does not fit is lost (`is_lost`).

    Raises:
      ValueError: another format.
    """
    chosen = log_format or os.environ.get(LOG_FORMAT_VARIABLE) or "text"
    if chosen not in LOG_FORMATS:
        raise ValueError(f"log_format must be one of {', '.join(LOG_FORMATS)} (got {chosen})")
    handler = _Lines(stream)
    if chosen == "json":
        handler.format = json_line  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Lines(logging.StreamHandler[TextIO]):
    """Writes the log's lines to a stream whose reader or terminal may go away."""

    is_lost = False  # a line was: the disk is full
    _handled: BaseException | None = None  # what was being handled when the line was to be written

    def emit(self, record: logging.LogRecord) -> None:
        self._handled = sys.exception()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (of logging)
        error = sys.exception()
        assert error is not None
        raise_interrupt_behind(error, after=self._handled)
        if isinstance(error, BrokenPipeError):
            # nobody reads: logging would print a traceback for this line and for each that follows
            raise error
        if isinstance(error, OSError) and error.errno == errno.EIO:
            return  # the terminal is gone, and the traceback would be written to it
        if isinstance(error, OSError) and error.errno in FULL:
            if not self.is_lost:
                self.is_lost = True
                with suppress(OSError):  # of a standard error on the same disk
                    print(f"discreet: {LOST}: {error.strerror}", file=sys.stderr)
            return
        super().handleError(record)


def is_lost(name: str = "discreet") -> bool:
    """True if lines of a log were lost because a disk is full."""
    return any(getattr(each, "is_lost", False) for each in logging.getLogger(name).handlers)


def raise_interrupt_behind(error: BaseException, *, after: BaseException | None = None) -> None:
    """Raises the KeyboardInterrupt during which an error was raised, if there is one and it came
    after another exception. The loss of a terminal is a signal, which interrupts a line's display,
    and then an error of the display's clean-up."""
    before: BaseException | None = error
    while before is not None and before is not after:
        if isinstance(before, KeyboardInterrupt):
            raise before
        before = before.__context__
