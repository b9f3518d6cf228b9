"""The clients of a run, as its rounds ask them: what comes of a cohort is counted as it passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from discreet.mechanisms.sums import UsableReply
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TrainRequest
from discreet.server.cohort_sampling import CohortSampling
from discreet.server.progress import Progress
from discreet.server.transport import ReplyStats, Transport


class AskedClients:
    """Asks clients by a transport, and keeps what is told of a round.

    Attributes:
      transport: asks them.
      must_be_finite: the epsilons that a run keeps finite, by their names in a reply.
      progress: shows that replies come; None: nothing is shown.
      available: the clients that could be asked at last.
      cohort: how many were asked at last.
      started: when they could, by `time.monotonic`: the time that it waits for clients is no
        round's.
      stats: of the replies of this round.
      refused: all that have ever refused: they stay out, for a spent budget or a policy does not
        change.
    """

    def __init__(self, transport: Transport, must_be_finite: tuple[str, ...]) -> None:
        self.transport = transport
        self.must_be_finite = must_be_finite
        self.progress: Progress | None = None
        self.available: Sequence[int] = ()
        self.cohort = 0
        self.started = time.monotonic()
        self.stats = ReplyStats(must_be_finite)
        self.refused = set[int]()

    def begin(self) -> ReplyStats:
        """The empty statistics of a new round."""
        self.stats = ReplyStats(self.must_be_finite)
        return self.stats

    def available_clients(self) -> Sequence[int]:
        """See `discreet.server.round.Clients`."""
        self.available = self.transport.available_clients()
        self.started = time.monotonic()
        return self.available

    def draw(self, sampling: CohortSampling, number: int, source: RandomSource) -> list[int]:
        """The cohort of round `number`."""
        cohort = sampling.draw(self.available_clients(), source.child("cohort"), number=number)
        self.cohort = len(cohort)
        return cohort

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterator[UsableReply]:
        """See `discreet.server.round.Clients`."""
        self.cohort = len(cohort)
        replies = self.transport.ask(asked, params, cohort)
        if self.progress is not None and asked.work.trains:
            replies = self.progress.counted(replies, cohort=len(cohort))
        for reply in replies:
            counted = self.stats.count(reply)
            if counted is not None:
                yield counted
        self.refused |= self.stats.refused

    @property
    def all_refuse(self) -> bool:
        """True if each client that could be asked at last has refused."""
        return bool(self.available) and not set(self.available) - self.refused
