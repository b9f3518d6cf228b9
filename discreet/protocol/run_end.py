"""The end of a ServerApp's run, in one line."""

from __future__ import annotations

import logging
from typing import NoReturn

from flwr.serverapp import Grid
from flwr.supercore.exit import ExitCode, flwr_exit
from flwr.superlink.grid import InMemoryGrid


def end_run(grid: Grid, error: Exception) -> NoReturn:
    """One line in the run's log, then the end of this process and of the run."""
    logging.getLogger("discreet").error("discreet: %s", error)
    if isinstance(grid, InMemoryGrid):
        raise SystemExit(2) from error
    # A SuperLink learns of a plain exit only when the heartbeats stay away, a minute later. It
    # counts the run as failed by this code too, and does not say here, as for its code of an error,
    # that an exception was unhandled.
    flwr_exit(ExitCode.GRACEFUL_EXIT_SIGTERM, "The run has failed.")
