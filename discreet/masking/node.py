"""A node's side of a masked sum: bytes in, bytes out. The node's state is on disk before an answer
leaves, and before the work on data begins.

Bonawitz et al. 2017, figure 4, with the checks against a malicious server. Added here: an attempt's
context binds all signed keys (`identity.context_of_keys`), nodes sign the lists of survivors and of
lost nodes together, and a seed has a check.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from discreet.masking import masks, wire
from discreet.masking.identity import (
    Directory,
    Identity,
    attempt_bytes,
    context_of_keys,
    context_of_vectors,
    is_signed,
    sign_keys,
    split_keys,
    survivors_message,
)
from discreet.masking.masks import KEY_BYTES, SEED_BYTES
from discreet.masking.store import Attempt, FolderStore, NodeState, read_state
from discreet.masking.wire import MalformedBytes, MaskingRefused, Part, Stage, Terms

MOST_ATTEMPTS = 100
Answer = tuple[NodeState, bytes]
Release = Callable[[], None]
Vector = Callable[[Release], NDArray[np.int64]]


@dataclass(frozen=True)
class MaskingNode:
    """A node that takes part in the masked sums of one run and reveals nothing but these sums.

    Whatever the server sends, it and up to c nodes of its choice learn at most one sum for each
    round, of at least n - d vectors, this node's among them: they learn nothing else of this node's
    vector, as long as X25519, HKDF, AES and ECDSA are what they are believed to be, at most c of
    the other nodes reveal what they know, and nobody restores an old state.

    Args:
      identity: this node's name and private key.
      directory: all n nodes' public keys, this node's among them, as people compared them.
      terms: the terms, from this node's settings.
      store: keeps its state between two messages.

    Raises:
      ValueError: the directory does not have n nodes, or has another key for this node.
    """

    identity: Identity
    directory: Directory
    terms: Terms
    store: FolderStore

    def __post_init__(self) -> None:
        names = len(self.directory.keys)
        nodes = self.terms.nodes
        if names != nodes:
            raise ValueError(f"the list of nodes has {names} names, but the run has {nodes} nodes")
        if not self.directory.has(self.identity):
            raise ValueError(
                f"the list of nodes lacks the public key of this node, {self.identity.name!r}"
            )

    @property
    def agreed(self) -> bytes:
        """The digest of everything that decides a sum before it is requested: the terms, and the
        nodes' names and keys."""
        return wire.digest(self.terms.encode(), self.directory.digest)

    def answer(
        self, request: bytes, vector: Vector, release: Release, *, asked: bytes = b""
    ) -> bytes:
        """The reply to a request, once.

        Args:
          request: as it came from the server.
          vector: returns the vector to be summed, int64 of shape (length,), of any integers; they
            count modulo 2^k. It is called only if the masked vector is requested and all checks
            pass. Before it looks at data it calls its argument: from then on the sum is charged and
            the request is answered, on disk, whatever the work does.
          release: charges the release of this round's sum. It is called once per round, even if the
            round is tried again, because at most one attempt can be opened. An exception from it
            goes to the caller, and nothing leaves.
          asked: all that the round asks for beyond the terms of the run, in any bytes. Vectors of
            nodes that were asked differently can't be opened together. An attempt at a round with
            another request or other terms than the attempt before is charged again, so that an
            expensive sum can't be obtained for the price of a cheap one.

        Raises:
          MaskingRefused: the request is malformed, repeated, or not allowed by this node. The state
            is unchanged.
          ValueError: `vector` returned something else.
        """
        try:
            parts = self._parts(request)
            with self.store.locked(self.terms.run):
                if parts[0].stage == Stage.MASKED:
                    body = self._masked(self._state(), parts[0], vector, release, asked)
                    return wire.write_reply([parts[0].answered(body)])
                return self._without_work(self._state(), parts)
        except MalformedBytes as error:
            raise MaskingRefused(f"malformed: {error}") from error

    def _state(self) -> NodeState:
        saved = self.store.load(self.terms.run)
        return read_state(saved) if saved is not None else NodeState()

    def _save(self, state: NodeState) -> None:
        """Saves the state before a reply leaves, so that it is never given twice."""
        self.store.save(self.terms.run, state.encode())

    def _without_work(self, state: NodeState, parts: Sequence[Part]) -> bytes:
        """The reply to stages that need no vector."""
        replies = []
        for part in parts:
            state, body = self._stage(state, part)
            replies.append(part.answered(body))
        self._save(state)
        return wire.write_reply(replies)

    def _stage(self, state: NodeState, part: Part) -> Answer:
        """The state after a stage that needs no vector, and the reply to it."""
        match part.stage:
            case Stage.KEYS:
                return self._keys(state, part)
            case Stage.SHARES:
                return self._shares(state, part)
            case Stage.CONFIRM:
                return self._confirm(state, part)
            case Stage.UNMASK:
                return self._unmask(state, part)
        raise MaskingRefused(f"no stage {part.stage}")

    def _parts(self, request: bytes) -> tuple[Part, ...]:
        terms, parts = wire.read_request(request)
        if difference := self.terms.difference(terms):
            raise MaskingRefused(f"other terms: {difference}")
        if len(parts) not in (1, 2) or len({part.round for part in parts}) != len(parts):
            raise MalformedBytes("a request must have one part, or two of different rounds")
        if len(parts) > 1 and Stage.MASKED in {part.stage for part in parts}:
            raise MalformedBytes("a masked vector must be requested by itself")
        return parts

    def _keys(self, state: NodeState, part: Part) -> Answer:
        """Fresh keys and a fresh seed, signed. A new attempt at a round ends the one before."""
        _check_open(state, part)
        if part.attempt in state.begun:
            raise MaskingRefused(f"this attempt at round {part.round} has begun already")
        if len(state.begun) >= MOST_ATTEMPTS:
            raise MaskingRefused(
                f"{MOST_ATTEMPTS} attempts have begun since the last sum, the most that are allowed"
            )
        if part.body:
            raise MalformedBytes("a request for keys must have nothing but its round")
        secrets = os.urandom(2 * KEY_BYTES + SEED_BYTES)
        sealing, masking, seed = _split(secrets)
        public = (masks.public_key(sealing), masks.public_key(masking), masks.seed_check(seed))
        signed = sign_keys(self.identity, self.directory, attempt_bytes(self.terms, part), public)
        keys = {self.identity.name: signed}
        attempt = Attempt(part.round, part.attempt, Stage.KEYS, secrets, keys, self.agreed)
        return state.begin(attempt), wire.join(*signed)

    def _shares(self, state: NodeState, part: Part) -> Answer:
        """A share of this node's seed and of its mask key for each other node, sealed for it."""
        attempt = self._held(state, part)
        me = self.identity.name
        place = attempt_bytes(self.terms, part)
        keys = split_keys(part.body)
        if strangers := [name for name in keys if name not in self.directory.keys]:
            raise MaskingRefused(f"{strangers[0]!r} is not in this node's list of nodes")
        if keys.get(me) != attempt.keys[me]:
            raise MaskingRefused(
                "the keys attributed to this node are not the keys that it made for this attempt"
            )
        self._check_enough(keys, "take part")
        for name in keys:
            if not is_signed(keys[name], name, directory=self.directory, place=place):
                raise MaskingRefused(
                    f"the keys of {name!r} are not signed with its registered key for this attempt"
                )
        context = context_of_keys(place, keys)
        sealing, masking, seed = _split(attempt.secrets)
        shares = masks.split_secret(
            seed + masking, threshold=self.terms.threshold, count=self.terms.nodes
        )
        mine = dict(zip(self.directory.names, shares, strict=True))
        sealed = {}
        for name in keys.keys() - {me}:
            sealed[name] = masks.seal(
                mine[name], sealing, keys[name].sealing, bound=masks.route(context, me, name)
            )
        attempt = replace(
            attempt, stage=Stage.SHARES, keys=keys, context=context, shares={me: mine[me]}
        )
        return state.with_attempt(attempt), wire.join_named(sealed)

    def _masked(
        self, state: NodeState, part: Part, vector: Vector, release: Release, asked: bytes
    ) -> bytes:
        """The masked vector. Its release is charged before the work on data, once per round, or
        once for each price. Nothing is written after that work, which may leave no files to open.

        Once it has left, other nodes can open it whatever this node does. At most one attempt at a
        round can be opened: opening takes t nodes, and these have then closed the round or ended
        every other attempt at it.
        """
        attempt = self._held(state, part)
        shares = {**attempt.shares, **self._opened_shares(attempt, wire.split_named(part.body))}
        self._check_enough(shares, "shared")
        context = context_of_vectors(attempt.context, asked)
        answered = replace(attempt, stage=Stage.MASKED, secrets=b"", context=context, shares=shares)
        price = wire.digest(self.terms.encode(), asked)
        after = replace(state.closed_until(part.round - 1), charged=part.round, price=price)

        @cache
        def begin() -> None:
            if (part.round, price) != (state.charged, state.price):
                release()
            self._save(after.with_attempt(answered))

        values = vector(begin)
        begin()  # also if the work did not
        if values.dtype != np.int64 or values.shape != (self.terms.length,):
            expected = f"int64 of shape ({self.terms.length},)"
            raise ValueError(f"the vector must be {expected}, not {values.dtype} {values.shape}")
        words = values.astype(np.uint32)
        _, masking, seed = _split(attempt.secrets)
        masks.add_mask(words, masks.own_key(seed, context), subtract=False)
        peers = {name: attempt.keys[name].masking for name in shares if name != self.identity.name}
        masks.add_pair_masks(words, masking, self.identity.name, peers, context=context)
        return wire.pack(words, self.terms.bits)

    def _opened_shares(self, attempt: Attempt, sealed: Mapping[str, bytes]) -> dict[str, bytes]:
        """Opens the shares before anything is masked.

        This node can't tell whether the server or the sender corrupted a share, and if it alone
        left the sender out, its masks would not match the others'. So it refuses and names the
        sender.
        """
        me = self.identity.name
        opened = {}
        sealing, _, _ = _split(attempt.secrets)
        for name, data in sealed.items():
            if name not in attempt.keys or name == me:
                raise MaskingRefused(
                    f"shares of {name!r}, which is not among the others in this attempt"
                )
            bound = masks.route(attempt.context, name, me)
            try:
                opened[name] = masks.unseal(data, sealing, attempt.keys[name].sealing, bound=bound)
            except MalformedBytes as error:
                raise MaskingRefused(f"from {name!r}: {error}") from error
            if len(opened[name]) != SEED_BYTES + KEY_BYTES:
                raise MaskingRefused(f"the shares of {name!r} have a wrong size")
        return opened

    def _confirm(self, state: NodeState, part: Part) -> Answer:
        """A signature on the lists of nodes that are in the sum and that are not: only one pair of
        lists per attempt."""
        attempt = self._held(state, part)
        alive, gone = (wire.split_names(value) for value in wire.split(part.body, 2))
        self._check_lists(attempt, alive, gone)
        signature = self.identity.sign(survivors_message(attempt.context, alive, gone))
        return state.with_attempt(replace(attempt, stage=Stage.CONFIRM, alive=alive)), signature

    def _check_lists(self, attempt: Attempt, alive: tuple[str, ...], gone: tuple[str, ...]) -> None:
        if both := set(alive) & set(gone):
            raise MaskingRefused(
                f"{min(both)!r} is in both lists: its seed and mask key together would "
                "reveal its vector"
            )
        if set(alive) | set(gone) != set(attempt.shares):
            raise MaskingRefused(
                "the lists together must be the nodes whose shares this node received"
            )
        if self.identity.name not in alive:
            raise MaskingRefused("the list of survivors lacks this node, which sent its vector")
        self._check_enough(alive, "are in the sum")

    def _unmask(self, state: NodeState, part: Part) -> Answer:
        """For each node that shared: the share of its seed if it is in the sum, otherwise the share
        of its mask key. Then the node erases its secrets of this round."""
        attempt = self._held(state, part)
        self._check_signatures(attempt, wire.split_named(part.body))
        given = {
            name: share[:SEED_BYTES] if name in attempt.alive else share[SEED_BYTES:]
            for name, share in attempt.shares.items()
        }
        return state.closed_until(part.round), wire.join_named(given)

    def _check_signatures(self, attempt: Attempt, signatures: Mapping[str, bytes]) -> None:
        message = survivors_message(
            attempt.context, attempt.alive, attempt.shares.keys() - set(attempt.alive)
        )
        for name, signature in signatures.items():
            if name not in attempt.alive:
                raise MaskingRefused(f"a signature of {name!r}, which is not in the sum")
            if not self.directory.verify(name, signature, message):
                raise MaskingRefused(f"{name!r} did not sign the lists that this node signed")
        if len(signatures) < self.terms.threshold:
            raise MaskingRefused(
                f"{len(signatures)} nodes signed the lists, but {self.terms.threshold} are needed"
            )

    def _check_enough(self, names: Collection[str], what: str) -> None:
        if len(names) < self.terms.survivors:
            least = self.terms.survivors
            raise MaskingRefused(
                f"only {len(names)} nodes {what}, and a sum of fewer than {least} is none"
            )

    def _held(self, state: NodeState, part: Part) -> Attempt:
        """The attempt that a part belongs to, if the part's stage is the next one."""
        _check_open(state, part)
        attempt = state.attempts.get(part.round)
        before = Stage(part.stage - 1)
        if attempt is None or attempt.attempt != part.attempt:
            raise MaskingRefused(
                f"this node takes no part in this attempt at round {part.round}: it "
                "ended, or never began"
            )
        if attempt.agreed != self.agreed:
            raise MaskingRefused(
                "it signed its keys for this attempt with other terms, or another list of peers"
            )
        if attempt.stage >= part.stage:
            raise MaskingRefused(
                f"the stage {part.stage.name} of this attempt was answered already, "
                "and each is answered once"
            )
        if attempt.stage != before:
            raise MaskingRefused(
                f"{part.stage.name} comes after {before.name}, not after {attempt.stage.name}"
            )
        return attempt


def _check_open(state: NodeState, part: Part) -> None:
    if part.round <= state.closed:
        raise MaskingRefused(
            f"round {part.round} is over for this node, which only takes part in later rounds"
        )


def _split(secrets: bytes) -> tuple[bytes, bytes, bytes]:
    """The private keys for shares and for masks, and the seed."""
    return secrets[:KEY_BYTES], secrets[KEY_BYTES : 2 * KEY_BYTES], secrets[2 * KEY_BYTES :]
