"""The clients of a run: the transport that asks them, through Flower's grid or in the same process,
and what is counted of their replies as they pass."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from discreet.mechanisms.sums import PartialReply, UnopenedSum, UsableReply
from discreet.planning.state import State
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import CohortSampling
from discreet.protocol.messages import EPSILONS, TrainReply, TrainRequest
from discreet.server.progress import Progress
from discreet.settings.rules import ConfigError
from discreet.settings.wording import Key, Wording

logger = logging.getLogger("discreet")

MOST_SAID = 300  # characters of what a client said
MOST_SILENT = 2  # rounds in a row in which nobody gives a usable reply, before the run ends


class MessagesTooLarge(OSError):
    """The messages of a round exceed what the server accepts. No client was asked, and nothing is
    charged."""


class NobodyAnswers(OSError):
    """None of the clients that were asked gives a usable reply, so the run would spend its budget
    on noise. It can be resumed."""


@dataclass(frozen=True)
class Failure:
    """A client that was asked and gave no usable reply. It counts as zero; noise and denominator
    stay.

    kind: `refused` (its policy or budget), `malformed`, `error`, `late`. An `unaccounted` client
    did reply, and its update counts, but it reports an infinite epsilon although this run has a
    finite one.
    """

    client: int
    kind: str
    reason: str


def readable(said: str) -> str:
    """A client's text for a log and a terminal: printable characters only, and truncated."""
    return "".join(character for character in said[:MOST_SAID] if character.isprintable())


Reply = TrainReply | PartialReply | UnopenedSum | Failure


class RoundAbandoned(Exception):
    """Too few clients are left to open a sum, and nothing was released. The round may be tried
    again. `failures`: those of the missing clients."""

    def __init__(self, reason: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(reason)
        self.failures = tuple(failures)


def check_exchange(transport: object, *, masked: bool) -> None:
    """Raises ConfigError unless the transport makes unopened sums exactly if the run opens such
    sums."""
    makes_sums = getattr(transport, "makes_sums", False)
    if masked and not makes_sums:
        why = " is not supported here: the server would read each update"
        raise ConfigError(Wording(Key("privacy.user.aggregation=secure"), why))
    if makes_sums and not masked:
        raise ConfigError(
            "privacy.user.aggregation must be secure for a transport of masked sums (got plain)"
        )


class Transport(Protocol):
    """Asks clients for their updates. A transport with `makes_sums` returns exactly one
    `UnopenedSum` of them."""

    def available_clients(self) -> Sequence[int]:
        """The clients that can be asked now."""

    def ask(self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]) -> Iterable[Reply]:
        """A reply or failure for each client of the cohort, as they arrive, without holding the
        whole cohort in memory. RoundAbandoned: too few clients are left for a sum."""


@dataclass
class ReplyStats:
    """Statistics of a round's replies, counted as they pass: the number `accepted`, failures with
    their reasons, and the largest epsilons that clients report. Clients that report infinity for an
    epsilon in `must_be_finite` are `unaccounted` and not included in the maxima."""

    must_be_finite: tuple[str, ...] = ()
    accepted: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    epsilons: dict[str, float] = field(default_factory=dict)
    unaccounted: set[int] = field(default_factory=set)

    def count(self, reply: Reply) -> UsableReply | None:
        """Counts a client's answer; returns the reply that counts, or None for a failure."""
        if isinstance(reply, Failure):
            self.miss([reply])
            return None
        if isinstance(reply, UnopenedSum):
            self.accepted += reply.replies
            return reply
        infinite: list[str] = []
        if isinstance(reply, TrainReply):  # other replies are this process's own
            self.accepted += 1
            infinite = [name for name in self.must_be_finite if math.isinf(getattr(reply, name))]
            if infinite:
                reason = f"it reports an infinite {' and '.join(infinite)}"
                self.miss([Failure(reply.client, "unaccounted", reason)])
                self.unaccounted.add(reply.client)
        else:
            self.accepted += reply.replies
        for name in set(EPSILONS).difference(infinite):
            self.epsilons[name] = max(self.epsilons.get(name, 0.0), getattr(reply, name))
        return reply

    def miss(self, failures: Iterable[Failure]) -> None:
        """Counts clients whose replies are not in the sum, or have no epsilon."""
        for failure in failures:
            self.failures[failure.kind] += 1
            self.reasons.append(f"client {failure.client} {failure.kind}: {failure.reason}")
            if failure.kind == "refused":
                self.refused.add(failure.client)

    def added_to(self, state: State) -> State:
        """The state with the epsilons that clients have reported. A client that sits out a round
        still has its earlier spending."""
        spent = {name: max(getattr(state, name), most) for name, most in self.epsilons.items()}
        return replace(state, **spent, unaccounted=sorted({*state.unaccounted, *self.unaccounted}))

    def log_failures(self) -> None:
        """Logs the first failures in words, and the number of others."""
        for reason in self.reasons[:3]:
            logger.warning("  %s", reason)
        if len(self.reasons) > 3:
            logger.warning("  and %d more: %s", len(self.reasons) - 3, dict(self.failures))


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
      stats: the statistics of the replies since then.
      refused: the clients that have refused to train in a round. What they say to a rating is not
        counted: it may cost more than a round.
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

    def available_clients(self) -> Sequence[int]:
        """See `discreet.server.round.Clients`. The statistics begin anew."""
        self.stats = ReplyStats(self.must_be_finite)
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
        """True if every client that was available most recently has refused to train, and those
        that were asked last gave refusals and no reply."""
        is_refused = bool(self.stats.refused) and not self.stats.accepted
        return is_refused and not set(self.available) - self.refused


@dataclass
class Silence:
    """Consecutive times in which no client that was asked gave a usable reply.

    Attributes:
      what: the kind of request.
      server_pays: only the server's ledger pays, so a client that refuses is a failure; a client
        whose own budget is spent is not a failure of the run.
    """

    what: str
    server_pays: bool
    in_a_row: int = 0

    def note(self, stats: ReplyStats, *, asked: int) -> None:
        """Counts another time. A time at which no client was asked changes nothing.

        Raises:
          NobodyAnswers: it is the time `MOST_SILENT` in a row.
        """
        if not self.server_pays:
            asked -= stats.failures["refused"]
        if asked:
            if stats.accepted:
                self.in_a_row = 0
            else:
                self.in_a_row = self.in_a_row + 1
        if self.in_a_row >= MOST_SILENT:
            if stats.reasons:
                last = stats.reasons[-1]
            else:
                last = "no reply"
            raise NobodyAnswers(
                f"in {self.in_a_row} {self.what} in a row no client gave a usable "
                f"reply; the last failure: {last}"
            )
