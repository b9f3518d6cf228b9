"""A node's public keys for one attempt, signed with the key that it registered with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from discreet.masking.agreement import Terms
from discreet.masking.identity import Directory, Identity
from discreet.masking.masks import CHECK_BYTES, KEY_BYTES
from discreet.masking.wire import TAG, MalformedBytes, digest, join, join_named, round_bytes, split


@dataclass(frozen=True)
class SignedKeys:
    """What a node publishes for one attempt.

    Attributes:
      sealing, masking: X25519 public keys, for shares on their way and for masks.
      check: of its seed (`masks.seed_check`).
      signature: over these, the terms, the list of peers, the round, the attempt and the node's name.
    """

    sealing: bytes
    masking: bytes
    check: bytes
    signature: bytes

    def encode(self) -> bytes:
        """In bytes; `read_keys` is the way back."""
        return join(self.sealing, self.masking, self.check, self.signature)


@dataclass(frozen=True)
class Place:
    """Which attempt at which round of which run: what everything in it is bound to.

    `peers` is the digest of the signer's list of nodes. The server has no such list: what it derives is bound to the
    signed keys instead, and so to what they were signed for.
    """

    terms: Terms
    round: int
    attempt: bytes
    peers: bytes = b""

    def encode(self) -> bytes:
        """In bytes, without the peers."""
        return join(self.terms.encode(), round_bytes(self.round), self.attempt)

    def context(self, keys: Mapping[str, bytes]) -> bytes:
        """The digest of this place and of all signed keys in it.

        Each node's own fresh keys are among them, so that nothing of another attempt fits, even if a server gives two
        attempts one name.
        """
        return digest(TAG + b" context", self.encode(), join_named(keys))


def sign_keys(identity: Identity, place: Place, public: tuple[bytes, bytes], check: bytes) -> SignedKeys:
    """Signs `public`, the keys for shares and for masks, and the seed's check."""
    return SignedKeys(*public, check, identity.sign(_message(identity.name, place, (*public, check))))


def read_keys(data: bytes) -> SignedKeys:
    """What `SignedKeys.encode` wrote; the signature is not checked.

    Raises:
      MalformedBytes: it is none.
    """
    keys = SignedKeys(*split(data, 4))
    if (len(keys.sealing), len(keys.masking), len(keys.check)) != (KEY_BYTES, KEY_BYTES, CHECK_BYTES):
        raise MalformedBytes("public keys of another size")
    return keys


def is_signed(keys: SignedKeys, name: str, *, place: Place, directory: Directory) -> bool:
    """Whether `name` signed these keys for this place with the identity that the directory has for it."""
    return directory.verify(name, keys.signature, _message(name, place, (keys.sealing, keys.masking, keys.check)))


def context_of_vectors(context: bytes, asked: bytes) -> bytes:
    """The context from which masks are derived, once it is known what the nodes are asked for with their vectors: masks
    of nodes that were asked differently do not cancel."""
    return digest(TAG + b" asked", context, asked)


def survivors_message(context: bytes, alive: tuple[str, ...], gone: tuple[str, ...]) -> bytes:
    """What nodes sign in the confirm stage: who is in the sum, and who shared and is not."""
    lists = (join(*(name.encode() for name in alive)), join(*(name.encode() for name in gone)))
    return join(TAG + b" survivors", context, *lists)


def _message(name: str, place: Place, values: tuple[bytes, ...]) -> bytes:
    return join(TAG + b" keys", place.encode(), place.peers, name.encode(), *values)
