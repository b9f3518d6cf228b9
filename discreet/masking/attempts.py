"""What a node remembers of the masked sums of one run, and how that is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from discreet.masking.masks import KEY_BYTES, SEED_BYTES
from discreet.masking.wire import MOST_ROUND, MalformedBytes, Stage, join, join_named, round_bytes, split, split_named

SECRET_BYTES = 2 * KEY_BYTES + SEED_BYTES
_NO_ROUND = -1


@dataclass(frozen=True)
class Attempt:
    """One attempt at one round, as far as this node has come.

    Attributes:
      round, attempt: which.
      stage: the last one that was answered.
      secrets: the private keys for shares and for masks, and the seed; empty once the masked vector has been made.
      keys: of each node that takes part, its signed public keys, as the server sent them.
      agreed: the digest of the terms and the list of peers that this node's keys were signed for.
      context: the digest of the terms, the round, the attempt and all these keys; once the masked vector has been made
        also of what it was asked for.
      shares: of each node that shared, the share of its seed and of its mask key that this node holds.
      alive: who is in the sum, once this node has signed that.
    """

    round: int
    attempt: bytes
    stage: Stage
    secrets: bytes = field(repr=False)
    keys: Mapping[str, bytes] = field(default_factory=dict)
    agreed: bytes = b""
    context: bytes = b""
    shares: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    alive: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The attempt in bytes; `read_attempt` is the way back."""
        fields = (bytes([self.stage]), round_bytes(self.round), self.attempt, self.secrets, join_named(self.keys))
        alive = join(*(name.encode() for name in self.alive))
        return join(*fields, self.agreed, self.context, join_named(self.shares), alive)


@dataclass(frozen=True)
class NodeState:
    """What a node knows of a run: closed rounds, the last round it charged, and at most two attempts that go on.

    Attributes:
      closed: nothing of this round or an earlier one is answered any more.
      charged: the last round whose release was paid for.
      price: digest of the terms and of what was asked: what it cost.
      attempts: by round; the round that is being summed, and the next one's keys and shares.
      begun: every attempt that began at a round that is not closed, with its round.
    """

    closed: int = _NO_ROUND
    charged: int = _NO_ROUND
    price: bytes = b""
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    begun: Mapping[bytes, int] = field(default_factory=dict)

    def with_attempt(self, attempt: Attempt) -> NodeState:
        """The state with this attempt in place of another of its round."""
        return replace(self, attempts={**self.attempts, attempt.round: attempt})

    def begin(self, attempt: Attempt) -> NodeState:
        """A new attempt: of the others only one of the round before it is kept, which may wait for its last stages."""
        kept = {number: each for number, each in self.attempts.items() if number == attempt.round - 1}
        begun = {**self.begun, attempt.attempt: attempt.round}
        return replace(self, attempts={**kept, attempt.round: attempt}, begun=begun)

    def closed_until(self, number: int) -> NodeState:
        """Closes `number` and what is before it: their secrets and shares are forgotten."""
        kept = {each: attempt for each, attempt in self.attempts.items() if each > number}
        begun = {name: each for name, each in self.begun.items() if each > number}
        return replace(self, closed=max(self.closed, number), attempts=kept, begun=begun)

    def encode(self) -> bytes:
        """The state in bytes."""
        numbers = (round_bytes(self.closed + 1), round_bytes(self.charged + 1))
        begun = join(*(each for name, number in self.begun.items() for each in (name, round_bytes(number))))
        return join(*numbers, self.price, begun, *(self.attempts[number].encode() for number in sorted(self.attempts)))


# The state of a run of which nothing is answered any more.
OVER = NodeState(closed=MOST_ROUND).encode()


def read_state(data: bytes) -> NodeState:
    """What `NodeState.encode` wrote.

    Raises:
      MalformedBytes: it is damaged.
    """
    fields = split(data)
    if len(fields) < 4:
        raise MalformedBytes("a state without its rounds")
    closed, charged = (int.from_bytes(value, "big") - 1 for value in fields[:2])
    names = split(fields[3])
    begun = {name: int.from_bytes(number, "big") for name, number in zip(names[::2], names[1::2], strict=True)}
    attempts = [_read_attempt(value) for value in fields[4:]]
    return NodeState(closed, charged, fields[2], {attempt.round: attempt for attempt in attempts}, begun)


def _read_attempt(data: bytes) -> Attempt:
    stage, number, attempt, secrets, keys, agreed, context, shares, alive = split(data, 9)
    if stage not in {bytes([each]) for each in Stage} or len(secrets) not in (0, SECRET_BYTES):
        raise MalformedBytes("an attempt that can't be")
    names = tuple(name.decode() for name in split(alive))
    begun = int.from_bytes(number, "big"), attempt, Stage(stage[0]), secrets
    return Attempt(*begun, split_named(keys), agreed, context, split_named(shares), names)
