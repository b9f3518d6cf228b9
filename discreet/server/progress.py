"""The progress of a run: a line of the log for each round, and on a terminal clients per second and the time left."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import TextColumn, TimeRemainingColumn

from discreet.mechanisms.sums import PartialReply, UnopenedSum
from discreet.queries.scores import SCORES
from discreet.server.transport import Brought

SECONDS_BETWEEN = 0.1
COLUMNS = ("round {task.fields[round]}/{task.total:.0f}", "{task.fields[clients]} clients", "{task.fields[rate]}")

LINE_WIDTH = 100  # of a terminal
# What a line that is too long leaves out, one after the other; metrics.csv has it.
LEFT_OUT = ("seconds", "clip", "loss", *SCORES[1:])


@dataclass
class Progress:
    """One line at the end of a terminal; the log goes above it.

    Attributes:
      stream: the terminal; what is none stays as it is, and so it does without a stream.
      rounds: that are planned.
      clock: seconds.
    """

    stream: TextIO | None
    rounds: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._display = Display(
            *map(TextColumn, COLUMNS),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(file=self.stream),
            auto_refresh=False,  # a thread of its own would be in the way of workers that are forked
            transient=True,
            disable=self.stream is None or not self.stream.isatty(),
            get_time=self.clock,
        )
        self._display.add_task("", total=self.rounds, round=0, clients="0/0", rate="")
        self.line = self._display.tasks[0]
        self._round = self._clients = 0
        self._started = self._last = self.clock()

    @contextmanager
    def shown(self, done: int) -> Iterator[None]:
        """Shows the line while the block runs; so many rounds are done already."""
        self._round, self._started = done, self.clock()
        self._display.update(self.line.id, completed=done, round=done)
        if self._display.disable:
            yield
            return
        with self._display, log_above(self.stream):
            yield

    def counted(self, replies: Iterable[Brought], *, cohort: int) -> Iterator[Brought]:
        """Passes replies on, and shows that they come."""
        self._round += 1
        self._show(0, cohort)
        arrived = 0
        for reply in replies:
            clients = reply.replies if isinstance(reply, PartialReply | UnopenedSum) else 1
            arrived, self._clients = arrived + clients, self._clients + clients
            self._show(arrived, cohort)
            yield reply

    def _show(self, arrived: int, cohort: int) -> None:
        now = self.clock()
        if self._display.disable or now - self._last < SECONDS_BETWEEN:
            return
        self._last = now
        self._display.update(
            self.line.id,
            completed=self._round - 1 + (arrived / cohort if cohort else 1),
            round=self._round,
            clients=f"{arrived}/{cohort}",
            rate=f"{self._clients / max(now - self._started, 1e-9):.3g} clients/s",
        )
        try:
            self._display.refresh()
        except OSError:
            self._display.disable = True  # the terminal is gone


@contextmanager
def log_above(stream: TextIO | None) -> Iterator[None]:
    """While rich shows the line, what is written to sys.stdout goes above it; the log's handlers know the older one."""
    ours = [h for h in logging.getLogger("discreet").handlers if isinstance(h, logging.StreamHandler)]
    handlers = [handler for handler in ours if handler.stream is stream]
    for handler in handlers:
        handler.setStream(sys.stdout)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(stream)


def round_line(row: dict[str, object], *, rounds: int) -> str:
    """A round in one line: what a person watches, in at most `LINE_WIDTH` characters. Guarantees that are off have no
    epsilon here; a run names them when it starts and when it ends.

    >>> row = {"round": 2, "loss": 0.5, "cohort": 9, "replies": 8, "epsilon_user": 1.5, "seconds": 0.25}
    >>> round_line(row, rounds=30)
    'round 2/30  loss 0.5000  replies 8/9  epsilon user 1.500  0.2 s'
    """
    shown = (*((name, name, ".4f") for name in (*SCORES, "loss")), ("clip", "clip_norm", ".3g"))
    spent = {name: row.get(f"epsilon_{name}") for name in ("user", "example", "local")}
    on = [f"{name} {value:.3f}" for name, value in spent.items() if isinstance(value, float) and math.isfinite(value)]
    parts = {"round": f"round {row['round']}/{rounds}"}
    parts |= {name: f"{name} {row[column]:{form}}" for name, column, form in shown if row.get(column) is not None}
    parts |= {"replies": f"replies {row['replies']}/{row['cohort']}", "epsilon": f"epsilon {' '.join(on) or 'none'}"}
    parts["seconds"] = f"{row.get('seconds', math.nan):.1f} s"
    for name in LEFT_OUT:
        if len("  ".join(parts.values())) > LINE_WIDTH:
            parts.pop(name, None)
    return "  ".join(parts.values())
