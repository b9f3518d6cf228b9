"""The server's side of one attempt: what it has been sent so far, what it asks next, and the sum in the end."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from discreet.masking.agreement import Abandoned, MalformedReply, Terms
from discreet.masking.masks import KEY_BYTES, SEED_BYTES, add_mask, exchanged_key, own_key, pair_key, seed_check
from discreet.masking.packing import unpack
from discreet.masking.shares import combine
from discreet.masking.signed_keys import Place, SignedKeys, context_of_vectors, read_keys
from discreet.masking.wire import (
    ATTEMPT_BYTES,
    Part,
    Stage,
    join,
    join_named,
    join_names,
    split_named,
)


@dataclass
class Collected:
    """One attempt at one round. Memory: one vector, whatever the number of nodes.

    Attributes:
      asked: what nodes are asked for with their vectors, beyond the terms; known when the round begins.
      keys: signed keys, of who takes part.
      sealed: of each node that shared, its sealed share for each other node.
      alive: who sent a masked vector; their sum is `total`.
      signatures: on the lists of who is in the sum and who is not.
      given: of each node that unmasks, its shares.
    """

    terms: Terms
    names: tuple[str, ...]
    round: int
    stage: Stage = Stage.KEYS
    attempt: bytes = field(default_factory=lambda: os.urandom(ATTEMPT_BYTES))
    asked: bytes = b""
    keys: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    alive: list[str] = field(default_factory=list)
    signatures: dict[str, bytes] = field(default_factory=dict)
    given: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)

    def parts(self) -> dict[str, Part]:
        """What each node is asked at this stage."""
        match self.stage:
            case Stage.KEYS:
                bodies = dict.fromkeys(self.names, b"")
            case Stage.SHARES:
                bodies = dict.fromkeys(self.keys, join_named(self.keys))
            case Stage.MASKED:
                self.total = np.zeros(self.terms.length, dtype=np.uint32)
                bodies = {name: join_named(self._for(name)) for name in self.sealed}
            case Stage.CONFIRM:
                bodies = dict.fromkeys(self.alive, join(join_names(self.alive), join_names(self.gone)))
            case Stage.UNMASK:
                bodies = dict.fromkeys(self.signatures, join_named(self.signatures))
        return {name: Part(self.stage, self.round, self.attempt, body) for name, body in bodies.items()}

    @property
    def gone(self) -> list[str]:
        """Who shared, and sent no masked vector."""
        return [name for name in self.sealed if name not in self.alive]

    def take(self, name: str, body: bytes) -> None:
        """Keeps a node's answer to what `parts` asks it.

        Raises:
          MalformedBytes, MalformedReply: it is none.
        """
        match self.stage:
            case Stage.KEYS:
                self.keys[name] = _usable(body)
            case Stage.SHARES:
                self.sealed[name] = _complete(split_named(body), set(self.keys) - {name})
            case Stage.MASKED:
                self.total += unpack(body, length=self.terms.length, bits=self.terms.bits)
                self.alive.append(name)
            case Stage.CONFIRM:
                self.signatures[name] = body
            case Stage.UNMASK:
                self.given[name] = self._shares(split_named(body))

    def advance(self) -> None:
        """To the next stage, with those who answered.

        Raises:
          Abandoned: they are too few.
        """
        sent: Mapping[Stage, Collection[str]] = {
            Stage.KEYS: self.keys,
            Stage.SHARES: self.sealed,
            Stage.MASKED: self.alive,
            Stage.CONFIRM: self.signatures,
            Stage.UNMASK: self.given,
        }
        answered = sent[self.stage]
        least = self.terms.survivors if self.stage <= Stage.MASKED else self.terms.threshold
        if len(answered) < least:
            raise Abandoned(f"{len(answered)} nodes answered the stage {self.stage.name}, and it takes {least}")
        if self.stage is not Stage.UNMASK:
            self.stage = Stage(self.stage + 1)

    def opened(self) -> NDArray[np.int64]:
        """The sum of the vectors of `alive` modulo 2^k, shape (length,), from 0 to 2^k - 1.

        Raises:
          Abandoned: the shares do not fit together: a node sent wrong ones.
        """
        signed = {name: read_keys(value) for name, value in self.keys.items()}
        place = Place(self.terms, self.round, self.attempt)
        context = context_of_vectors(place.context(self.keys), self.asked)
        for name in self.alive:
            add_mask(self.total, own_key(self._seed(name, signed[name]), context), subtract=True)
        for name in self.gone:
            key = self._mask_key(name, signed[name])
            for peer in self.alive:
                shared = pair_key(key, signed[peer].masking, context=context, names=(name, peer))
                add_mask(self.total, shared, subtract=peer < name)
        return (self.total & np.uint32(self.terms.mask)).astype(np.int64)

    def _for(self, name: str) -> dict[str, bytes]:
        return {sender: sealed[name] for sender, sealed in self.sealed.items() if sender != name}

    def _shares(self, given: dict[str, bytes]) -> dict[str, bytes]:
        _complete(given, set(self.sealed))
        sizes = {name: SEED_BYTES if name in self.alive else KEY_BYTES for name in given}
        if any(len(share) != sizes[name] for name, share in given.items()):
            raise MalformedReply("a share of another size")
        return given

    def _seed(self, name: str, signed: SignedKeys) -> bytes:
        for seed in self._candidates(name):
            if seed_check(seed) == signed.check:
                return seed
        raise Abandoned(f"the shares of the seed of {name!r} do not fit together: a node gave wrong ones")

    def _mask_key(self, name: str, signed: SignedKeys) -> X25519PrivateKey:
        for secret in self._candidates(name):
            key = X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() == signed.masking:
                return key
        raise Abandoned(f"the shares of the mask key of {name!r} do not fit together: a node gave wrong ones")

    def _candidates(self, name: str) -> Iterator[bytes]:
        """The secret from t neighbours among the givers, for each run of t: a wrong share is outside some run."""
        shares = [(self.names.index(giver) + 1, given[name]) for giver, given in sorted(self.given.items())]
        turned = (shares[start:] + shares[:start] for start in range(len(shares)))
        return (combine(dict(turn[: self.terms.threshold])) for turn in turned)


def _complete(given: dict[str, bytes], names: set[str]) -> dict[str, bytes]:
    if set(given) != names:
        raise MalformedReply("shares of others than those who take part")
    return given


def _usable(body: bytes) -> bytes:
    keys, probe = read_keys(body), X25519PrivateKey.generate()
    for public in (keys.sealing, keys.masking):
        exchanged_key(probe, public, b"")
    return body
