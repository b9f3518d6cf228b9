"""The server's side of masked sums: it decides the message for each node, takes the replies, and
obtains the sum or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from discreet.masking import masks, wire
from discreet.masking.identity import (
    SignedKeys,
    attempt_bytes,
    context_of_keys,
    context_of_vectors,
    join_keys,
    read_keys,
)
from discreet.masking.masks import KEY_BYTES, SEED_BYTES
from discreet.masking.wire import (
    ATTEMPT_BYTES,
    Abandoned,
    MalformedBytes,
    Part,
    Stage,
    Terms,
    Words,
)


@dataclass(frozen=True)
class Opened:
    """A sum that was opened.

    Attributes:
      total: the sum of the vectors of `names` modulo 2^k, int64 of shape (length,), from 0 to 2^k -
        1.
      names: the nodes in it, in ascending order: at least n - d.
    """

    total: NDArray[np.int64]
    names: tuple[str, ...]


@dataclass
class Collected:
    """The answers to one attempt at one round. It holds one vector in memory, whatever the number
    of nodes.

    Attributes:
      asked: everything that nodes are asked for with their vectors, beyond the terms; known when
        the round begins.
      keys: the signed keys of the nodes that take part.
      sealed: for each node that shared, its sealed share for each other node.
      alive: the nodes that sent a masked vector; their sum is `total`.
      signatures: on the lists of who is in the sum and who is not.
      given: the shares from each node that unmasks.
    """

    terms: Terms
    names: tuple[str, ...]
    round: int
    stage: Stage = Stage.KEYS
    attempt: bytes = field(default_factory=lambda: os.urandom(ATTEMPT_BYTES))
    asked: bytes = b""
    keys: dict[str, SignedKeys] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    alive: list[str] = field(default_factory=list)
    total: Words = field(default_factory=lambda: np.zeros((), dtype=np.uint32))
    signatures: dict[str, bytes] = field(default_factory=dict)
    given: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def gone(self) -> list[str]:
        """The nodes that shared but sent no masked vector."""
        return [name for name in self.sealed if name not in self.alive]

    def parts(self) -> dict[str, Part]:
        """The part of a request for each node that is asked at this stage."""
        match self.stage:
            case Stage.KEYS:
                bodies = dict.fromkeys(self.names, b"")
            case Stage.SHARES:
                bodies = dict.fromkeys(self.keys, join_keys(self.keys))
            case Stage.MASKED:
                bodies = {
                    name: wire.join_named(
                        {of: each[name] for of, each in self.sealed.items() if of != name}
                    )
                    for name in self.sealed
                }
            case Stage.CONFIRM:
                bodies = dict.fromkeys(
                    self.alive, wire.join(wire.join_names(self.alive), wire.join_names(self.gone))
                )
            case Stage.UNMASK:
                bodies = dict.fromkeys(self.signatures, wire.join_named(self.signatures))
        return {name: self._part(body) for name, body in bodies.items()}

    def _part(self, body: bytes) -> Part:
        return Part(self.stage, self.round, self.attempt, body)

    def take(self, name: str, body: bytes) -> None:
        """Stores a node's answer to its part. MalformedBytes: it is not such an answer."""
        match self.stage:
            case Stage.KEYS:
                self.keys[name] = read_keys(body)
            case Stage.SHARES:
                self.sealed[name] = _complete(wire.split_named(body), self.keys.keys() - {name})
            case Stage.MASKED:
                words = wire.unpack(body, length=self.terms.length, bits=self.terms.bits)
                words += self.total
                self.total = words
                self.alive.append(name)
            case Stage.CONFIRM:
                self.signatures[name] = body
            case Stage.UNMASK:
                given = _complete(wire.split_named(body), self.sealed.keys())
                if any(
                    len(share) != (SEED_BYTES if of in self.alive else KEY_BYTES)
                    for of, share in given.items()
                ):
                    raise MalformedBytes("a share of a wrong size")
                self.given[name] = given

    def advance(self) -> None:
        """Proceeds to the next stage with the nodes that answered. Abandoned: they are too few."""
        answers: tuple[Collection[str], ...] = (
            self.keys,
            self.sealed,
            self.alive,
            self.signatures,
            self.given,
        )
        answered = len(answers[self.stage - 1])
        if self.stage <= Stage.MASKED:
            least = self.terms.survivors
        else:
            least = self.terms.threshold
        if answered < least:
            raise Abandoned(
                f"{answered} nodes answered the stage {self.stage.name}, but {least} are needed"
            )
        if self.stage is not Stage.UNMASK:
            self.stage = Stage(self.stage + 1)

    def opened(self) -> Opened:
        """The sum of the vectors of `alive`. Abandoned: shares do not fit together, because a node
        sent wrong ones."""
        peers = {name: self.keys[name].masking for name in self.alive}
        place = attempt_bytes(self.terms, self._part(b""))
        context = context_of_vectors(context_of_keys(place, self.keys), self.asked)
        for name in self.alive:
            seed = self._secret(name, masks.seed_check, self.keys[name].check)
            masks.add_mask(self.total, masks.own_key(seed, context), subtract=True)
        for name in self.gone:
            masking = self._secret(name, masks.public_key, self.keys[name].masking)
            # as if it had sent a vector of zeros
            masks.add_pair_masks(self.total, masking, name, peers, context=context)
        total = self.total & np.uint32((1 << self.terms.bits) - 1)
        return Opened(total.astype(np.int64), tuple(sorted(self.alive)))

    def _secret(self, name: str, public: Callable[[bytes], bytes], published: bytes) -> bytes:
        """A node's seed or mask key from t neighbours among the givers. A wrong share is missing
        from at least one such run of t."""
        shares = [
            (self.names.index(giver) + 1, given[name])
            for giver, given in sorted(self.given.items())
        ]
        for start in range(len(shares)):
            turned = shares[start:] + shares[:start]
            secret = masks.combine(dict(turned[: self.terms.threshold]))
            if public(secret) == published:
                return secret
        raise Abandoned(
            f"the shares of the secrets of {name!r} are inconsistent: a node sent wrong ones"
        )


def _complete(given: dict[str, bytes], names: Collection[str]) -> dict[str, bytes]:
    if given.keys() != set(names):
        raise MalformedBytes("shares of nodes that do not take part")
    return given


class Exchange:
    """Requests to nodes, and their replies.

    Attributes:
      stage: the stage of this round. The caller must charge its ledger before it sends the requests
        of `Stage.UNMASK`.
      round: its number.
      requests: the bytes for each node that is asked.
    """

    def __init__(
        self, server: MaskingServer, attempts: Sequence[Collected], then: int | None
    ) -> None:
        self._server = server
        self._attempts = attempts
        self._then = then
        self.stage = attempts[0].stage
        self.round = attempts[0].round
        self._asked: dict[str, list[tuple[Collected, Part]]] = {}
        for attempt in attempts:
            for name, part in attempt.parts().items():
                self._asked.setdefault(name, []).append((attempt, part))
        self.requests: Mapping[str, bytes] = {
            name: wire.write_request(server.terms, [part for _, part in asked])
            for name, asked in self._asked.items()
        }

    def take(self, name: str, reply: bytes) -> None:
        """Takes a node's reply, in any order. A node without an accepted reply is lost for this
        attempt. MalformedBytes: it is not an answer to this request, or the node has answered
        already."""
        asked = self._asked.pop(name, None)
        if asked is None:
            raise MalformedBytes(f"{name!r} was not asked, or has answered already")
        answers = wire.read_reply(reply)
        if [part.answered(b"") for _, part in asked] != [part.answered(b"") for part in answers]:
            raise MalformedBytes("an answer to another request")
        for (attempt, _), answer in zip(asked, answers, strict=True):
            attempt.take(name, answer.body)

    def close(self) -> Exchange | Opened:
        """Continues with the nodes that have answered.

        If too few nodes made keys for the next round, that round later starts with new keys.
        Abandoned: too few nodes are left; the server can begin a new attempt.
        """
        now, *following = self._attempts
        now.advance()
        if self.stage is Stage.MASKED and self._then is not None:
            following = [Collected(self._server.terms, now.names, self._then)]
        elif following:
            try:
                following[0].advance()
            except Abandoned:
                following = []
        if self.stage is Stage.UNMASK:
            self._server.ready = following
            return now.opened()
        return Exchange(self._server, (now, *following), self._then)


@dataclass
class MaskingServer:
    """Runs masked sums, round by round. It neither waits nor sends: the caller does both.

    A round takes the stages KEYS, SHARES, MASKED, CONFIRM and UNMASK. With `then`, the first two
    stages of the round that follows ride along with the last two of this one, so that a round costs
    three exchanges.

    Args:
      terms: the terms of the run.
      names: the names of all n nodes.

    Attributes:
      ready: the attempt at the next round whose keys and shares rode along; empty if none did.

    Raises:
      ValueError: there are not n different names.
    """

    terms: Terms
    names: tuple[str, ...]
    ready: Sequence[Collected] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        self.names = tuple(sorted(self.names))
        if len(set(self.names)) != self.terms.nodes or len(self.names) != self.terms.nodes:
            raise ValueError(
                f"a run of {self.terms.nodes} nodes needs that many different names "
                f"(got {self.names})"
            )

    def begin(self, round: int, *, then: int | None = None, asked: bytes = b"") -> Exchange:
        """The first exchange of a new attempt at a round.

        Args:
          round: its number, which increases from one opened sum to the next. An abandoned round may
            be begun again.
          then: the next round, whose keys are made while this one ends; None if there is none.
          asked: all that nodes are asked for with their vectors, as `MaskingNode.answer` is told
            it.
        """
        ready = [each for each in self.ready if each.round == round]
        self.ready = ()
        if ready:
            now = ready[0]
        else:
            now = Collected(self.terms, self.names, round)
        now.asked = asked
        return Exchange(self, (now,), then)
