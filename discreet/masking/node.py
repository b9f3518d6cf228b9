"""A node's side of a masked sum: bytes in, bytes out, every answer on disk before it leaves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from discreet.masking.agreement import MaskingRefused, Terms
from discreet.masking.attempts import NodeState, read_state
from discreet.masking.identity import Directory, Identity
from discreet.masking.node_stages import (
    Answer,
    Owner,
    Party,
    answer_confirm,
    answer_keys,
    answer_masked,
    answer_shares,
    answer_unmask,
)
from discreet.masking.store import Store
from discreet.masking.wire import MalformedBytes, Part, Stage, read_request, write_reply

_STAGES = {
    Stage.KEYS: answer_keys,
    Stage.SHARES: answer_shares,
    Stage.CONFIRM: answer_confirm,
    Stage.UNMASK: answer_unmask,
}
_MOST_PARTS = 2  # the last stages of a round, and the first ones of the next


class MaskingNode:
    """A node that takes part in the masked sums of one run, and gives away nothing but these sums.

    Whatever the server sends, it and up to c nodes of its choice learn at most one sum for each round, of at least
    n - d vectors, this node's among them: they learn nothing else of this node's vector, as long as X25519, HKDF,
    AES and ECDSA are what they are believed to be, at most c of the others give away what they know, and nobody puts an
    old state back.

    Args:
      identity: this node's name and private key.
      directory: all n nodes' public keys, this node's among them, as people compared them.
      terms: as this node's settings have them.
      store: where its state is kept.

    Raises:
      ValueError: the directory has not n nodes, or another key for this node.
    """

    def __init__(self, identity: Identity, directory: Directory, terms: Terms, store: Store) -> None:
        if len(directory.keys) != terms.nodes:
            raise ValueError(f"the list of nodes has {len(directory.keys)} names, and the run has {terms.nodes} nodes")
        if not directory.has(identity):
            raise ValueError(f"the list of nodes has not the public key of {identity.name!r}, which is this node")
        self._party, self._store = Party(identity, directory, terms), store

    def answer(
        self,
        request: bytes,
        vector: Callable[[], NDArray[np.int64]],
        release: Callable[[], None],
        *,
        asked: bytes = b"",
    ) -> bytes:
        """The reply to a request, once.

        Args:
          request: as it came from the server.
          vector: gives what is to be summed, int64 of shape (length,), any integers; they count modulo 2^k. Called
            only if the masked vector is asked for and everything is in order.
          release: pays for the release of this round's sum, after `vector` and before the masked vector leaves; called
            once a round, also if the round is tried more often, since at most one attempt can be opened. An exception
            from it goes to the caller, and nothing leaves.
          asked: what the round asks for beyond the terms of the run, in any bytes. Vectors of nodes that were asked
            differently can't be opened together. An attempt at a round that asks for something else than the one
            before, or on other terms, is paid anew, so that nobody gets a dear sum for the price of a cheap one.

        Raises:
          MaskingRefused: the request is malformed, a repetition, or asks for what this node does not give. The
            state is as it was.
          ValueError: `vector` gave something else.
        """
        run = self._party.terms.run
        try:
            parts = self._parts(request)
            with self._store.locked(run):
                saved = self._store.load(run)
                state, replies = NodeState() if saved is None else read_state(saved), []
                for part in parts:
                    state, body = self._answer(state, part, Owner(vector, release, asked))
                    replies.append(part.answered(body))
                self._store.save(run, state.encode())  # before the reply leaves: it is never given again
        except MalformedBytes as error:
            raise MaskingRefused(f"malformed: {error}") from error
        return write_reply(replies)

    def _parts(self, request: bytes) -> tuple[Part, ...]:
        terms, parts = read_request(request)
        if difference := self._party.terms.difference(terms):
            raise MaskingRefused(f"other terms: {difference}")
        if not 1 <= len(parts) <= _MOST_PARTS or len({part.round for part in parts}) != len(parts):
            raise MalformedBytes("a request must have a part, or two of different rounds")
        if len(parts) > 1 and Stage.MASKED in {part.stage for part in parts}:
            raise MalformedBytes("a masked vector is asked for by itself")
        return parts

    def _answer(self, state: NodeState, part: Part, owner: Owner) -> Answer:
        if part.stage is Stage.MASKED:
            return answer_masked(self._party, state, part, owner)
        return _STAGES[part.stage](self._party, state, part)
