"""The server's side of masked sums: it says what to send to whom, takes the replies, and gets the sum or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from discreet.masking.agreement import Abandoned, MalformedReply, Terms
from discreet.masking.collecting import Collected
from discreet.masking.wire import MalformedBytes, Part, Stage, read_reply, write_request


@dataclass(frozen=True)
class Opened:
    """A sum that was read.

    Attributes:
      total: the sum of the vectors of `names` modulo 2^k, int64 of shape (length,), from 0 to 2^k - 1.
      names: who is in it, in ascending order: at least n - d.
    """

    total: NDArray[np.int64]
    names: tuple[str, ...]


class Exchange:
    """Requests to nodes, and the place for their replies.

    Attributes:
      stage: of this round. Before the requests of `Stage.UNMASK` are sent the caller charges its ledger.
      round: which.
      requests: bytes for each node that is asked.
    """

    def __init__(self, server: MaskingServer, attempts: tuple[Collected, ...]) -> None:
        self._server, self._attempts = server, attempts
        self._asked: dict[str, list[Part]] = {}
        for attempt in attempts:
            for name, part in attempt.parts().items():
                self._asked.setdefault(name, []).append(part)
        self.stage, self.round = attempts[0].stage, attempts[0].round
        terms = attempts[0].terms
        self.requests: Mapping[str, bytes] = {name: write_request(terms, parts) for name, parts in self._asked.items()}

    def take(self, name: str, reply: bytes) -> None:
        """Takes a node's reply, in any order. A node without a reply that was taken is gone for this attempt.

        Raises:
          MalformedReply: it is no answer to this request, or this node has answered.
        """
        asked = self._asked.pop(name, None)
        if asked is None:
            raise MalformedReply(f"{name!r} was not asked, or has answered")
        try:
            answers = read_reply(reply)
            if [part.answered(b"") for part in asked] != [part.answered(b"") for part in answers]:
                raise MalformedReply("the answer to another request")
            for attempt, body in self._bodies(asked, answers):
                attempt.take(name, body)
        except MalformedBytes as error:
            raise MalformedReply(f"{name!r}: {error}") from error

    def close(self) -> Exchange | Opened:
        """Goes on with those who have answered.

        Raises:
          Abandoned: they are too few. The server can begin a new attempt.
        """
        return self._server._close(self)

    def _bodies(self, asked: list[Part], answers: Iterable[Part]) -> list[tuple[Collected, bytes]]:
        of = {attempt.attempt: attempt for attempt in self._attempts}
        return [(of[part.attempt], answer.body) for part, answer in zip(asked, answers, strict=True)]


@dataclass
class MaskingServer:
    """Runs masked sums, round by round, without any way to wait or to send: the caller does both.

    A round takes the stages KEYS, SHARES, MASKED, CONFIRM and UNMASK. With `then`, the first two stages of the round
    that follows ride along with the last two of this one, so that a round costs three exchanges.

    Args:
      terms: of the run.
      names: of all n nodes.

    Raises:
      ValueError: there are not n different names.
    """

    terms: Terms
    names: Iterable[str]
    _now: Collected | None = field(default=None, init=False, repr=False)
    _next: Collected | None = field(default=None, init=False, repr=False)
    _then: int | None = field(default=None, init=False, repr=False)
    _open: Exchange | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.names = tuple(sorted(self.names))
        if len(set(self.names)) != self.terms.nodes or len(self.names) != self.terms.nodes:
            raise ValueError(f"a run of {self.terms.nodes} nodes needs as many different names (got {self.names})")

    def begin(self, round: int, *, then: int | None = None, asked: bytes = b"") -> Exchange:
        """The first exchange of a new attempt at a round.

        Args:
          round: rises from one opened sum to the next. An abandoned round may be begun again.
          then: the round whose keys are made while this one ends; None if none follows.
          asked: what nodes are asked for with their vectors, as `MaskingNode.answer` is told it.

        Raises:
          ValueError: `then` is not a later round.
        """
        if then is not None and then <= round:
            raise ValueError(f"then must be a round after {round} (got {then})")
        ready, self._next, self._then = self._next, None, then
        if ready is not None and ready.round == round and ready.stage is Stage.MASKED:
            self._now = ready
        else:
            self._now = self._fresh(round)
        self._now.asked = asked
        return self._ask((self._now,))

    def _fresh(self, number: int) -> Collected:
        return Collected(self.terms, tuple(self.names), number)

    def _ask(self, attempts: tuple[Collected, ...]) -> Exchange:
        self._open = Exchange(self, attempts)
        return self._open

    def _close(self, exchange: Exchange) -> Exchange | Opened:
        if self._open is not exchange or self._now is None:
            raise ValueError("this exchange is closed already, or another one was begun")
        self._open = None
        now, answered = self._now, self._now.stage
        now.advance()
        if answered is Stage.MASKED and self._then is not None:
            self._next = self._fresh(self._then)
        elif answered >= Stage.CONFIRM:
            self._advance_next()
        if answered is Stage.UNMASK:
            return Opened(now.opened(), tuple(sorted(now.alive)))
        return self._ask((now,) if self._next is None else (now, self._next))

    def _advance_next(self) -> None:
        """If too few nodes made keys for the round that follows, it begins anew when its time comes."""
        if self._next is None:
            return
        try:
            self._next.advance()
        except Abandoned:
            self._next = None
