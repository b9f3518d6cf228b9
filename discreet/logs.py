"""Discreet's log: plain lines for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO

LOG_FORMATS = ("text", "json")
LOG_FORMAT_VARIABLE = "DISCREET_LOG_FORMAT"
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

    If the stream is a pipe that nobody reads any more, logging raises BrokenPipeError.

    Raises:
      ValueError: another format.
    """
    chosen = log_format or os.environ.get(LOG_FORMAT_VARIABLE) or "text"
    if chosen not in LOG_FORMATS:
        raise ValueError(f"log_format must be one of {', '.join(LOG_FORMATS)} (got {chosen})")
    handler = logging.StreamHandler(stream)
    if chosen == "json":
        handler.format = json_line  # type: ignore[method-assign]
    handler.handleError = partial(_handle_error, handler)  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _handle_error(handler: logging.Handler, record: logging.LogRecord) -> None:
    error = sys.exception()
    if isinstance(error, BrokenPipeError):
        # nobody reads: logging would print a traceback for this line and for each that follows
        raise error
    logging.Handler.handleError(handler, record)
