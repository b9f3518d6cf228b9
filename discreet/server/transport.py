"""The transport of a round, through Flower's grid or in the same process. The algorithm is the same
for both."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from discreet.mechanisms.sums import PartialReply, UnopenedSum
from discreet.planning.state import State
from discreet.protocol.messages import EPSILONS, TrainReply, TrainRequest
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
    epsilons: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EPSILONS, 0.0))
    unaccounted: set[int] = field(default_factory=set)

    def count(self, reply: Reply) -> TrainReply | PartialReply | UnopenedSum | None:
        """Counts a client's answer; returns the reply that counts, or None for a failure."""
        if isinstance(reply, Failure):
            self.miss([reply])
            return None
        if not isinstance(reply, UnopenedSum):
            self._report(reply)
        self.accepted += 1 if isinstance(reply, TrainReply) else reply.replies
        return reply

    def _report(self, reply: TrainReply | PartialReply) -> None:
        infinite: list[str] = []
        if isinstance(reply, TrainReply):  # other replies are this process's own
            infinite = [name for name in self.must_be_finite if math.isinf(getattr(reply, name))]
            if infinite:
                reason = f"it reports an infinite {' and '.join(infinite)}"
                self.miss([Failure(reply.client, "unaccounted", reason)])
                self.unaccounted.add(reply.client)
        for name in set(EPSILONS).difference(infinite):
            self.epsilons[name] = max(self.epsilons[name], getattr(reply, name))

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
        spent = {name: max(getattr(state, name), self.epsilons[name]) for name in EPSILONS}
        return replace(state, **spent, unaccounted=sorted({*state.unaccounted, *self.unaccounted}))

    def log_failures(self) -> None:
        """Logs the first failures in words, and the number of others."""
        for reason in self.reasons[:3]:
            logger.warning("  %s", reason)
        if len(self.reasons) > 3:
            logger.warning("  and %d more: %s", len(self.reasons) - 3, dict(self.failures))


@dataclass
class Silence:
    """Consecutive times in which no client that was asked gave a usable reply. `what`: the kind of
    request."""

    what: str
    in_a_row: int = 0

    def note(self, stats: ReplyStats, *, asked: int) -> None:
        """Counts another time. A time at which no client was asked changes nothing.

        Raises:
          NobodyAnswers: it is the time `MOST_SILENT` in a row.
        """
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
