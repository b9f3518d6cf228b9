"""The clients of a run, as its rounds ask them. Replies are counted as they pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from discreet.mechanisms.sums import UsableReply
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import CohortSampling
from discreet.protocol.messages import TrainRequest
from discreet.server.progress import Progress
from discreet.server.transport import ReplyStats, Transport


class AskedClients:
    """Asks clients through a transport, and records what they report in a round.

    Attributes:
      transport: the transport that asks them.
      must_be_finite: the names in a reply of the epsilons that must be finite in this run.
      progress: displays arriving replies; None: no display.
      available: the clients that were available most recently.
      cohort: the size of the most recent cohort.
      started: the time when they were available, by `time.monotonic`; waiting for clients is not
        part of a round.
      stats: the statistics of this round's replies.
      refused: the clients that refused in an earlier round. They are not asked again, because a
        spent budget or a policy does not change.
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
        self.refused |= self.stats.refused
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
        return filter(None, map(self.stats.count, replies))

    @property
    def all_refuse(self) -> bool:
        """True if every client that was available most recently has refused."""
        refused = self.refused | self.stats.refused
        return bool(self.available) and not set(self.available) - refused
