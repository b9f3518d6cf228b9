"""A node's memory of the masked sums of one run, and the folder that stores it, so that a restarted
process answers nothing twice."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from discreet.masking.identity import SignedKeys
from discreet.masking.wire import MOST_ROUND, MalformedBytes, MaskingRefused, Stage

_CHECK_BYTES = 32
_FORM = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", hide_input_in_errors=True)


@dataclass(frozen=True, config=_FORM)
class Attempt:
    """One attempt at one round, as far as this node has progressed.

    Attributes:
      round, attempt: its identifiers.
      stage: the last one that was answered.
      secrets: the private keys for shares and for masks, and the seed; empty once the masked vector
        has been made.
      keys: the signed public keys of each node that takes part.
      agreed: the digest of the terms and the list of peers that this node's keys were signed for.
      context: the digest of the terms, the round, the attempt and all these keys; once the masked
        vector has been made also of what it was asked for.
      shares: for each node that shared, this node's shares of its seed and of its mask key.
      alive: the nodes in the sum, once this node has signed that.
    """

    round: int
    attempt: bytes
    stage: Stage
    secrets: bytes = field(repr=False)
    keys: Mapping[str, SignedKeys]
    agreed: bytes
    context: bytes = b""
    shares: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    alive: tuple[str, ...] = ()


@dataclass(frozen=True, config=_FORM)
class NodeState:
    """A node's memory of a run: closed rounds, the last round it charged, and at most two attempts
    in progress.

    Attributes:
      closed: the last round that is closed; requests for it or an earlier one are refused; -1 at
        first.
      charged: the last round whose release was charged; -1 at first.
      price: the digest of the terms and the request of that charge.
      attempts: by round: that of the current sum, and that of the next round's keys and shares.
      begun: every attempt that began at a round that is not closed, with its round.
    """

    closed: int = -1
    charged: int = -1
    price: bytes = b""
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    begun: Mapping[bytes, int] = field(default_factory=dict)

    def with_attempt(self, attempt: Attempt) -> NodeState:
        """The state with this attempt in place of another one at its round."""
        return replace(self, attempts={**self.attempts, attempt.round: attempt})

    def begin(self, attempt: Attempt) -> NodeState:
        """A new attempt. Of the others, only one at the round before is kept, because it may be
        waiting for its last stages."""
        kept = {
            number: each for number, each in self.attempts.items() if number == attempt.round - 1
        }
        begun = {**self.begun, attempt.attempt: attempt.round}
        return replace(self, attempts={**kept, attempt.round: attempt}, begun=begun)

    def closed_until(self, number: int) -> NodeState:
        """Closes `number` and all earlier rounds: their secrets and shares are erased."""
        kept = {each: attempt for each, attempt in self.attempts.items() if each > number}
        begun = {name: each for name, each in self.begun.items() if each > number}
        return replace(self, closed=max(self.closed, number), attempts=kept, begun=begun)

    def encode(self) -> bytes:
        """The state as JSON; `read_state` reads it."""
        return _STATE.dump_json(self)


_STATE = TypeAdapter(NodeState)
OVER = NodeState(closed=MOST_ROUND).encode()  # of a run of which nothing is answered any more


def read_state(data: bytes) -> NodeState:
    """Inverse of `NodeState.encode`. Raises MalformedBytes: it is damaged."""
    try:
        return _STATE.validate_json(data)
    except ValidationError as error:
        raise MalformedBytes("the state of this run") from error


@dataclass(frozen=True)
class FolderStore:
    """A folder of the node's owner, which nobody else can read. It has a file for each run, which
    is replaced as a whole and fsynced.

    Secrets of a round are removed from the file once the round is over, but the disk may keep old
    blocks. A restored copy of the folder would let the node answer twice, so do not back it up."""

    folder: Path

    @contextmanager
    def locked(self, run: str) -> Iterator[None]:
        """Refuses while another process answers for the same node. MaskingRefused: another process
        does, or the folder can't be written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(
                self.folder / f"{run}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise MaskingRefused(f"the node's state can't be saved: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise MaskingRefused("another process is answering for this node") from error
        finally:
            os.close(handle)

    def load(self, run: str) -> bytes | None:
        """The state that was saved last; None if there is none. MaskingRefused: the file is
        damaged, or can't be read."""
        try:
            data = (self.folder / f"{run}.state").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MaskingRefused(f"the node's state can't be read: {error.strerror}") from error
        if hashlib.sha256(data[_CHECK_BYTES:]).digest() != data[:_CHECK_BYTES]:
            raise MaskingRefused(
                "the node's state of this run is damaged, so the node can't know which "
                "requests it has answered"
            )
        return data[_CHECK_BYTES:]

    def save(self, run: str, state: bytes) -> None:
        """Saves the state in place of the last one. When it returns, the state survives a crash.
        MaskingRefused: it can't be saved."""
        new = self.folder / f"{run}.new"
        try:
            with os.fdopen(
                os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.write(hashlib.sha256(state).digest() + state)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.folder / f"{run}.state")
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise MaskingRefused(f"the node's state can't be saved: {error.strerror}") from error
