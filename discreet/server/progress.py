"""The progress of a run on a terminal: clients per second and the time left."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import TextColumn, TimeRemainingColumn

from discreet.logs import raise_interrupt_behind
from discreet.mechanisms.sums import PartialReply, UnopenedSum

Reply = TypeVar("Reply")
SECONDS_BETWEEN = 0.1
COLUMNS = (
    "round {task.fields[round]}/{task.total:.0f}",
    "{task.fields[clients]} clients",
    "{task.fields[rate]}",
)


class Progress:
    """One progress line at the bottom of a terminal, for a run of `rounds` rounds; the log scrolls
    above it. `clock`: a function that returns seconds."""

    def __init__(
        self, stream: TextIO, rounds: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream
        self.clock = clock
        self._display = Display(
            *map(TextColumn, COLUMNS),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(file=stream),
            # a separate thread would interfere with forked workers
            auto_refresh=False,
            transient=True,
            get_time=clock,
        )
        self._display.add_task("", total=rounds, round=0, clients="0/0", rate="")
        self.line = self._display.tasks[0]
        self._round = self._clients = 0
        self._started = self._last = clock()

    @contextmanager
    def shown(self, done: int) -> Iterator[None]:
        """Shows the line while the block runs. So many rounds are done already."""
        self._round, self._started = done, self.clock()
        self._display.update(self.line.id, completed=done, round=done)
        handlers = [
            each
            for each in logging.getLogger("discreet").handlers
            if isinstance(each, logging.StreamHandler)
        ]
        ours = [handler for handler in handlers if handler.stream is self.stream]
        with self._display:
            # Text written to sys.stdout now appears above the line, but the log's handlers still
            # hold the old stream.
            for handler in ours:
                handler.setStream(sys.stdout)
            try:
                yield
            finally:
                for handler in ours:
                    handler.setStream(self.stream)

    def counted(self, replies: Iterable[Reply], *, cohort: int) -> Iterator[Reply]:
        """Passes replies on and displays their arrival."""
        self._round = self._round + 1
        arrived = 0
        self._show(0, cohort)
        for reply in replies:
            if isinstance(reply, PartialReply | UnopenedSum):
                clients = reply.replies
            else:
                clients = 1
            arrived = arrived + clients
            self._clients = self._clients + clients
            self._show(arrived, cohort)
            yield reply

    def _show(self, arrived: int, cohort: int) -> None:
        now = self.clock()
        if self._display.disable or now - self._last < SECONDS_BETWEEN:
            return
        self._last = now
        if cohort:
            done = arrived / cohort
        else:
            done = 1
        self._display.update(
            self.line.id,
            completed=self._round - 1 + done,
            round=self._round,
            clients=f"{arrived}/{cohort}",
            rate=f"{self._clients / max(now - self._started, 1e-9):.3g} clients/s",
        )
        try:
            self._display.refresh()
        except OSError as error:
            raise_interrupt_behind(error)
            self._display.disable = True  # the terminal is gone
