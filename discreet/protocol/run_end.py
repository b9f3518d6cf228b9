"""The end of a ServerApp's run, in one line."""

from __future__ import annotations

import logging
from typing import NoReturn

from flwr.serverapp import Grid
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.superlink.grid import InMemoryGrid


class RunFailed(Exception):
    """The run has failed. Its log has the reason."""


def end_run(grid: Grid, error: Exception) -> NoReturn:
    """Logs one line, then ends this process and the run, which Flower counts as failed.

    Raises:
      RunFailed: in a simulation, where Flower takes an exit for the end of a complete run.
    """
    logging.getLogger("discreet").error("discreet: %s", error)
    if isinstance(grid, InMemoryGrid):
        logging.getLogger("flwr").addFilter(without_traceback)
        raise RunFailed(str(error)) from error
    # A SuperLink notices a plain exit only when heartbeats are missing, a minute later. With this
    # code it counts the run as failed too, without the message of its error code that an exception
    # was unhandled.
    flwr_exit(ExitCode.GRACEFUL_EXIT_SIGTERM, "The run has failed.")


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter that keeps a failure's traceback out of Flower's log, as one line has reported
    it."""
    if record.exc_info and isinstance(record.exc_info[1], RunFailed):
        record.exc_info = None
    return True
