"""A line that tells how far a long run is: rounds, clients per second, time left. On a terminal only."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

from discreet.federated.messages import Reply
from discreet.federated.transport import Failure, Replies
from discreet.logs import ERASE

SECONDS_BETWEEN = 0.1


@dataclass
class Progress:
    """Writes over one line of a terminal. Log lines go above it: see `discreet.logs.log_to`.

    Attributes:
      stream: where to; what is no terminal stays as it is, and so it does without a stream.
      rounds: that are planned.
      clock: seconds.
    """

    stream: TextIO | None
    rounds: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._shown = self.stream is not None and self.stream.isatty()
        self._first = self._round = self._clients = self._in_round = 0
        self._started = self._last = self.clock()

    def begin(self, done: int) -> None:
        """So many rounds are done already."""
        self._first = self._round = done
        self._started = self.clock()

    def counted(
        self, replies: Iterable[Reply | Replies | Failure], *, cohort: int
    ) -> Iterator[Reply | Replies | Failure]:
        """Passes replies on, and shows that they come."""
        self._in_round, self._round = 0, self._round + 1
        self._show(cohort)
        for reply in replies:
            clients = reply.part.replies if isinstance(reply, Replies) else 1
            self._in_round, self._clients = self._in_round + clients, self._clients + clients
            self._show(cohort)
            yield reply

    def end(self) -> None:
        """Leaves the line empty."""
        if self._shown:
            self._write(ERASE)

    def line(self, cohort: int) -> str:
        """What is shown now."""
        elapsed = max(self.clock() - self._started, 1e-9)
        done = self._round - 1 - self._first + (self._in_round / cohort if cohort else 1)
        left = elapsed / done * (self.rounds - self._first - done) if done > 0 else None
        return (
            f"round {self._round}/{self.rounds}  {self._in_round}/{cohort} clients  "
            f"{self._clients / elapsed:.3g} clients/s  {duration(left)} left"
        )

    def _show(self, cohort: int) -> None:
        now = self.clock()
        if self._shown and now - self._last >= SECONDS_BETWEEN:
            self._last = now
            self._write(ERASE + self.line(cohort)[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        assert self.stream is not None
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            self._shown = False  # the terminal is gone


def duration(seconds: float | None) -> str:
    """A time for people.

    >>> duration(None), duration(42.4), duration(100), duration(7500)
    ('?', '42 s', '1 min 40 s', '2 h 5 min')
    """
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
