"""How far a run is: the numbers of the line, and who gets to see it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

import torch

from discreet.mechanisms.sums import PartialReply
from discreet.protocol.messages import TrainReply
from discreet.server.progress import Progress
from discreet.server.transport import Failure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def replies(count: int) -> Iterable[TrainReply | PartialReply | Failure]:
    several = PartialReply(torch.zeros(1), 0, count - 2, 1.0)
    return [TrainReply(1, torch.zeros(1), below=True), Failure(3, "late", ""), several]


def shown(stream: io.StringIO, *, rounds: int, done: int, cohorts: list[tuple[int, int]]) -> None:
    """Rounds of ten seconds each, with as many replies of as large a cohort."""
    now = 0.0
    progress = Progress(stream, rounds, clock=lambda: now)
    with progress.shown(done):
        for count, cohort in cohorts:
            now += 10
            assert len(list(progress.counted(replies(count) if count else [], cohort=cohort))) == (3 if count else 0)


def lines(stream: io.StringIO) -> list[str]:
    """What stood on the line, one after the other."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    pieces = re.split(r"[\r\n]|\x1b\[[^a-zA-Z]*[a-zA-Z]", plain)
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


def test_the_line_counts_clients_of_every_kind() -> None:
    stream = Terminal()
    shown(stream, rounds=10, done=4, cohorts=[(50, 50), (25, 50)])
    assert lines(stream)[-1] == "round 6/10 0/50 clients 2.5 clients/s 0:01:40 left"
    # The numbers of a look: every kind of reply counts for as many clients as it stands for.
    progress = Progress(Terminal(), 10, clock=iter(range(0, 10_000, 10)).__next__)
    with progress.shown(0):
        list(progress.counted(replies(50), cohort=50))
    assert progress.line.fields["clients"] == "50/50"
    assert progress.line.completed == 1
