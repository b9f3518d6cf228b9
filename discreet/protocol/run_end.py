"""The end of a ServerApp's run, in one line."""

from __future__ import annotations

import logging
from typing import NoReturn

from flwr.serverapp import Grid
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.superlink.grid import InMemoryGrid


class RunFailed(Exception):
    """The run has failed, and its log has said why."""


def end_run(grid: Grid, error: Exception) -> NoReturn:
    """One line in the run's log, then the end of this process and of the run, which Flower counts
    as failed.

    Raises:
      RunFailed: in a simulation, where Flower takes an exit for the end of a run that is complete.
    """
    logging.getLogger("discreet").error("discreet: %s", error)
    if isinstance(grid, InMemoryGrid):
        logging.getLogger("flwr").addFilter(without_traceback)
        raise RunFailed(str(error)) from error
    # A SuperLink learns of a plain exit only when the heartbeats stay away, a minute later. It
    # counts the run as failed by this code too, and does not say here, as for its code of an error,
    # that an exception was unhandled.
    flwr_exit(ExitCode.GRACEFUL_EXIT_SIGTERM, "The run has failed.")


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter that keeps a failure's traceback out of Flower's log: one line has reported it."""
    if record.exc_info and isinstance(record.exc_info[1], RunFailed):
        record.exc_info = None
    return True
