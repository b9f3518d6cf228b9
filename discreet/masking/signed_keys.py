"""A node's public keys for one attempt, signed with the key that it registered with, and what else is bound to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from discreet.masking import wire
from discreet.masking.identity import Directory, Identity
from discreet.masking.masks import CHECK_BYTES, KEY_BYTES, exchanged_key
from discreet.masking.wire import TAG, MalformedBytes, Part, Terms


class SignedKeys(NamedTuple):
    """The public keys of a node for one attempt; they travel as `join` has it.

    Attributes:
      sealing, masking: X25519 public keys, for shares on their way and for masks.
      check: of its seed (`masks.seed_check`).
      signature: over these, the place, the list of peers and the node's name.
    """

    sealing: bytes
    masking: bytes
    check: bytes
    signature: bytes


def sign_keys(identity: Identity, directory: Directory, place: bytes, values: tuple[bytes, bytes, bytes]) -> SignedKeys:
    """Signs `values`: the public keys for shares and for masks, and the seed's check."""
    return SignedKeys(*values, identity.sign(_message(identity.name, directory, place, values)))


def is_signed(keys: SignedKeys, name: str, *, directory: Directory, place: bytes) -> bool:
    """True if `name` signed these keys for this place and list of peers with its key in this list."""
    return directory.verify(name, keys.signature, _message(name, directory, place, keys[:3]))


def _message(name: str, directory: Directory, place: bytes, values: tuple[bytes, bytes, bytes]) -> bytes:
    return wire.join(TAG + b" keys", place, directory.digest, name.encode(), *values)


def read_keys(data: bytes) -> SignedKeys:
    """Signed keys as they travelled; the signature is not checked. Raises MalformedBytes: the keys have other sizes,
    or one can't be used.
    """
    keys = SignedKeys(*wire.split(data, 4))
    if (len(keys.sealing), len(keys.masking), len(keys.check)) != (KEY_BYTES, KEY_BYTES, CHECK_BYTES):
        raise MalformedBytes("public keys of another size")
    for public in (keys.sealing, keys.masking):
        exchanged_key(bytes(KEY_BYTES), public, b"")  # any private key finds one that gives zero
    return keys


def join_keys(keys: Mapping[str, SignedKeys]) -> bytes:
    """The signed keys of several nodes, by name."""
    return wire.join_named({name: wire.join(*each) for name, each in keys.items()})


def split_keys(data: bytes) -> dict[str, SignedKeys]:
    """Inverse of `join_keys`. Raises MalformedBytes: as `split_named` and `read_keys`."""
    return {name: read_keys(each) for name, each in wire.split_named(data).items()}


def place_of(terms: Terms, part: Part) -> bytes:
    """The attempt, the round and the run to which everything in an attempt is bound."""
    return wire.join(terms.encode(), wire.round_bytes(part.round), part.attempt)


def context_of_keys(place: bytes, keys: Mapping[str, SignedKeys]) -> bytes:
    """The digest of a place and of all signed keys in it.

    Each node's own fresh keys are among them, so that nothing of another attempt fits, even if a server gives two
    attempts one name. The server has no list of peers: through the keys it is bound to that for which they were signed.
    """
    return wire.digest(TAG + b" context", place, join_keys(keys))


def context_of_vectors(context: bytes, asked: bytes) -> bytes:
    """The context of masks, which `asked` is part of: masks of nodes that were asked differently do not cancel."""
    return wire.digest(TAG + b" asked", context, asked)


def survivors_message(context: bytes, alive: Iterable[str], gone: Iterable[str]) -> bytes:
    """The message that nodes sign in the confirm stage: who is in the sum, and who shared and is not."""
    return wire.join(TAG + b" survivors", context, wire.join_names(alive), wire.join_names(gone))
