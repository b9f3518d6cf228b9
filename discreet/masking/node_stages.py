"""What a node answers at each stage of an attempt, and what it refuses: state and request to state and answer.

Bonawitz et al. 2017, figure 4, with the checks against a malicious server. What is added: an attempt's context binds
all signed keys (`signed_keys.Place.context`), survivors are signed with those who are gone, and a seed has a check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from discreet.masking.agreement import MaskingRefused, Terms
from discreet.masking.attempts import Attempt, NodeState
from discreet.masking.identity import Directory, Identity
from discreet.masking.masks import KEY_BYTES, SEED_BYTES, add_mask, own_key, pair_key, seed_check
from discreet.masking.packing import pack
from discreet.masking.shares import route, seal, split_secret, unseal
from discreet.masking.signed_keys import (
    Place,
    SignedKeys,
    context_of_vectors,
    is_signed,
    read_keys,
    sign_keys,
    survivors_message,
)
from discreet.masking.wire import MalformedBytes, Part, Stage, digest, join_named, split, split_named, split_names

MOST_ATTEMPTS = 100
SHARE_BYTES = SEED_BYTES + KEY_BYTES
Answer = tuple[NodeState, bytes]


@dataclass(frozen=True)
class Party:
    """Who a node is among whom, and on which terms."""

    identity: Identity
    directory: Directory
    terms: Terms

    def place(self, part: Part) -> Place:
        """Where a part of a request belongs."""
        return Place(self.terms, part.round, part.attempt, self.directory.digest)

    @property
    def agreed(self) -> bytes:
        """The digest of all that decides a sum before it is asked for: the terms, and who is who."""
        return digest(self.terms.encode(), self.directory.digest)


@dataclass(frozen=True)
class Owner:
    """What the node's owner brings: the vector to be summed, the payment for its release, and what was asked for."""

    vector: Callable[[], NDArray[np.int64]]
    release: Callable[[], None]
    asked: bytes


def answer_keys(party: Party, state: NodeState, part: Part) -> Answer:
    """Fresh keys and a fresh seed, signed. A new attempt at a round puts an end to the one before."""
    if part.round <= state.closed:
        raise MaskingRefused(f"round {part.round} is over for this node, which takes part in rising order only")
    if part.attempt in state.begun:
        raise MaskingRefused(f"this attempt at round {part.round} has begun already, and each stage is answered once")
    if len(state.begun) >= MOST_ATTEMPTS:
        raise MaskingRefused(f"{MOST_ATTEMPTS} attempts have begun since the last sum")
    if part.body:
        raise MalformedBytes("a request for keys says nothing but its round")
    sealing, masking, seed = X25519PrivateKey.generate(), X25519PrivateKey.generate(), os.urandom(SEED_BYTES)
    public = (sealing.public_key().public_bytes_raw(), masking.public_key().public_bytes_raw())
    signed = sign_keys(party.identity, party.place(part), public, seed_check(seed)).encode()
    secrets = sealing.private_bytes_raw() + masking.private_bytes_raw() + seed
    keys = {party.identity.name: signed}
    return state.begin(Attempt(part.round, part.attempt, Stage.KEYS, secrets, keys, party.agreed)), signed


def answer_shares(party: Party, state: NodeState, part: Part) -> Answer:
    """A share of this node's seed and mask key for each other node, sealed for it."""
    attempt, me = _held(party, state, part, after=Stage.KEYS), party.identity.name
    keys = split_named(part.body)
    signed = {name: read_keys(value) for name, value in keys.items()}
    _check_keys(party, attempt, keys, signed, party.place(part))
    context = party.place(part).context(keys)
    sealing, masking, seed = _secrets(attempt)
    split_up = split_secret(seed + masking, threshold=party.terms.threshold, count=party.terms.nodes)
    mine = dict(zip(party.directory.names, split_up, strict=True))
    key = X25519PrivateKey.from_private_bytes(sealing)
    sealed = {
        name: _for_peer(name, partial(seal, mine[name], key, signed[name].sealing, bound=route(context, me, name)))
        for name in keys
        if name != me
    }
    attempt = replace(attempt, stage=Stage.SHARES, keys=keys, context=context, shares={me: mine[me]})
    return state.with_attempt(attempt), join_named(sealed)


def answer_masked(party: Party, state: NodeState, part: Part, owner: Owner) -> Answer:
    """The vector behind its masks. Its release is paid for before it leaves, once a round, or once for each price.

    From here on other nodes can open it, whatever this node does. At most one attempt at a round can be opened: it
    takes t nodes, and those have closed the round or have ended every other attempt at it.
    """
    attempt = _held(party, state, part, after=Stage.SHARES)
    shares = {**attempt.shares, **_opened_shares(party, attempt, split_named(part.body))}
    if len(shares) < party.terms.survivors:
        raise MaskingRefused(
            f"only {len(shares)} nodes shared, and a sum of fewer than {party.terms.survivors} is none"
        )
    words = _vector(owner, party.terms)
    price = digest(party.terms.encode(), owner.asked)
    if (part.round, price) != (state.charged, state.price):
        owner.release()
    attempt = replace(attempt, context=context_of_vectors(attempt.context, owner.asked))
    _add_masks(words, party, attempt, [name for name in shares if name != party.identity.name])
    attempt = replace(attempt, stage=Stage.MASKED, secrets=b"", shares=shares)
    state = replace(state.closed_until(part.round - 1), charged=part.round, price=price)
    return state.with_attempt(attempt), pack(words, party.terms.bits)


def answer_confirm(party: Party, state: NodeState, part: Part) -> Answer:
    """A signature of who is in the sum and who is not: one pair of lists for an attempt."""
    attempt = _held(party, state, part, after=Stage.MASKED)
    alive, gone = (split_names(value) for value in split(part.body, 2))
    _check_lists(party, attempt, alive, gone)
    signature = party.identity.sign(survivors_message(attempt.context, alive, gone))
    return state.with_attempt(replace(attempt, stage=Stage.CONFIRM, alive=alive)), signature


def answer_unmask(party: Party, state: NodeState, part: Part) -> Answer:
    """For each node that shared: the share of its seed if it is in the sum, else that of its mask key. Then forget."""
    attempt = _held(party, state, part, after=Stage.CONFIRM)
    gone = tuple(name for name in sorted(attempt.shares) if name not in attempt.alive)
    message = survivors_message(attempt.context, attempt.alive, gone)
    _check_signatures(party, attempt, split_named(part.body), message)
    given = {
        name: share[:SEED_BYTES] if name in attempt.alive else share[SEED_BYTES:]
        for name, share in attempt.shares.items()
    }
    return state.closed_until(part.round), join_named(given)


def _held(party: Party, state: NodeState, part: Part, *, after: Stage) -> Attempt:
    if part.round <= state.closed:
        raise MaskingRefused(f"round {part.round} is over for this node, which takes part in rising order only")
    attempt = state.attempts.get(part.round)
    if attempt is None or attempt.attempt != part.attempt:
        raise MaskingRefused(f"this node takes no part in this attempt at round {part.round}: it ended, or never began")
    if attempt.agreed != party.agreed:
        raise MaskingRefused("this node signed its keys for this attempt with other terms, or another list of peers")
    if attempt.stage >= part.stage:
        raise MaskingRefused(f"the stage {part.stage.name} of this attempt is answered, and each is answered once")
    if attempt.stage != after:
        raise MaskingRefused(f"the stage {part.stage.name} comes after {after.name}, not after {attempt.stage.name}")
    return attempt


def _check_keys(
    party: Party, attempt: Attempt, keys: dict[str, bytes], signed: dict[str, SignedKeys], place: Place
) -> None:
    me, terms = party.identity.name, party.terms
    if strangers := [name for name in keys if name not in party.directory.keys]:
        raise MaskingRefused(f"{strangers[0]!r} is not in this node's list of nodes")
    if keys.get(me) != attempt.keys[me]:
        raise MaskingRefused("the keys that are said to be this node's are not those that it made for this attempt")
    if len(keys) < terms.survivors:
        raise MaskingRefused(f"only {len(keys)} nodes take part, and a sum of fewer than {terms.survivors} is none")
    for name in keys:
        if not is_signed(signed[name], name, place=place, directory=party.directory):
            raise MaskingRefused(f"the keys of {name!r} are not signed with its registered key for this attempt")


def _opened_shares(party: Party, attempt: Attempt, sealed: dict[str, bytes]) -> dict[str, bytes]:
    """Shares are opened before anything is masked.

    Whether the server or the sender spoilt one can't be told from here, and a node that left the sender out alone would
    have other masks than the rest: so it refuses, and says whose shares they are.
    """
    me = party.identity.name
    if others := [name for name in sealed if name not in attempt.keys or name == me]:
        raise MaskingRefused(f"shares of {others[0]!r}, which is not among the others in this attempt")
    key = X25519PrivateKey.from_private_bytes(_secrets(attempt)[0])
    peers = {name: read_keys(attempt.keys[name]).sealing for name in sealed}
    routes = {name: route(attempt.context, name, me) for name in sealed}
    opened = {
        name: _for_peer(name, partial(unseal, sealed[name], key, peers[name], bound=routes[name])) for name in sealed
    }
    if short := [name for name, share in opened.items() if len(share) != SHARE_BYTES]:
        raise MaskingRefused(f"the shares of {short[0]!r} have another size than shares have")
    return opened


def _for_peer(name: str, work: Callable[[], bytes]) -> bytes:
    try:
        return work()
    except MalformedBytes as error:
        raise MaskingRefused(f"from {name!r}: {error}") from error


def _vector(owner: Owner, terms: Terms) -> NDArray[np.uint32]:
    values = owner.vector()
    if values.dtype != np.int64 or values.shape != (terms.length,):
        raise ValueError(f"the vector must be int64 of shape ({terms.length},), not {values.dtype} {values.shape}")
    return values.astype(np.uint32)


def _add_masks(words: NDArray[np.uint32], party: Party, attempt: Attempt, peers: list[str]) -> None:
    _, masking, seed = _secrets(attempt)
    me, key = party.identity.name, X25519PrivateKey.from_private_bytes(masking)
    add_mask(words, own_key(seed, attempt.context), subtract=False)
    for peer in peers:
        shared = pair_key(key, read_keys(attempt.keys[peer]).masking, context=attempt.context, names=(me, peer))
        add_mask(words, shared, subtract=me > peer)


def _check_lists(party: Party, attempt: Attempt, alive: tuple[str, ...], gone: tuple[str, ...]) -> None:
    if both := set(alive) & set(gone):
        raise MaskingRefused(
            f"{min(both)!r} is in both lists: its seed and its mask key together would show its vector"
        )
    if set(alive) | set(gone) != set(attempt.shares):
        raise MaskingRefused("the lists are not, together, the nodes whose shares this node was given")
    if party.identity.name not in alive:
        raise MaskingRefused("the list of survivors leaves this node out, which sent its vector")
    if len(alive) < party.terms.survivors:
        raise MaskingRefused(
            f"only {len(alive)} nodes are in the sum, and a sum of fewer than {party.terms.survivors} is none"
        )


def _check_signatures(party: Party, attempt: Attempt, signatures: dict[str, bytes], message: bytes) -> None:
    for name, signature in signatures.items():
        if name not in attempt.alive:
            raise MaskingRefused(f"a signature of {name!r}, which is not in the sum")
        if not party.directory.verify(name, signature, message):
            raise MaskingRefused(f"{name!r} did not sign the lists that this node signed")
    if len(signatures) < party.terms.threshold:
        raise MaskingRefused(f"{len(signatures)} nodes signed the lists, and it takes {party.terms.threshold}")


def _secrets(attempt: Attempt) -> tuple[bytes, bytes, bytes]:
    found = attempt.secrets
    return found[:KEY_BYTES], found[KEY_BYTES : 2 * KEY_BYTES], found[2 * KEY_BYTES :]
