"""The end of a ServerApp's run: Flower counts it as failed, and the log says why in one line."""

from __future__ import annotations

import logging

import pytest
from flwr.superlink.grid import InMemoryGrid

from discreet.protocol.run_end import RunFailed, end_run, without_traceback


class NoState(InMemoryGrid):
    """The grid of a simulation, without one."""

    def __init__(self) -> None:
        pass


def test_a_failed_run_of_a_simulation_raises_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # An exit alone, in the thread that Flower runs a ServerApp in, ends as finished:completed.
    with pytest.raises(RunFailed, match=r"^every client refuses$") as failed:
        end_run(NoState(), OSError("every client refuses"))
    logger = logging.getLogger("flwr")
    assert without_traceback in logger.filters
    logger.removeFilter(without_traceback)
    assert caplog.messages == ["discreet: every client refuses"]
    for error, kept in ((failed.value, False), (ValueError("another"), True)):
        info = (type(error), error, None)
        record = logging.LogRecord("flwr", logging.ERROR, "", 0, "raised", (), info)
        assert without_traceback(record)
        assert bool(record.exc_info) is kept
