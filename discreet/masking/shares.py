"""Secrets in shares of which t open them and t - 1 say nothing (Shamir 1979), by PyCryptodome, sealed for travel."""

from __future__ import annotations

import os
from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from discreet.masking.masks import exchanged_key
from discreet.masking.wire import TAG, MalformedBytes, join

_BLOCK = 16  # bytes: the field of PyCryptodome's Shamir is GF(2^128)
_NONCE = 12


def split_secret(secret: bytes, *, threshold: int, count: int) -> list[bytes]:
    """A share for each of the places 1 .. count, as long as the secret, which is a multiple of 16 bytes.

    >>> shares = split_secret(bytes(range(32)), threshold=2, count=3)
    >>> combine({1: shares[0], 3: shares[2]}) == bytes(range(32))
    True
    """
    blocks = (secret[start : start + _BLOCK] for start in range(0, len(secret), _BLOCK))
    columns = ([share for _, share in Shamir.split(threshold, count, block, False)] for block in blocks)
    return [b"".join(row) for row in zip(*columns, strict=True)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from exactly `threshold` shares by their places; from wrong shares, wrong bytes."""
    size = len(next(iter(shares.values())))
    return b"".join(
        Shamir.combine([(place, share[start : start + _BLOCK]) for place, share in shares.items()], False)
        for start in range(0, size, _BLOCK)
    )


def seal(plain: bytes, private: bytes, peer: bytes, *, bound: bytes) -> bytes:
    """AES-256-GCM under a key that both X25519 keys give, for this `route` alone: nonce, then ciphertext and tag.
    Raises MalformedBytes: `peer` is no public key that can be used.
    """
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(exchanged_key(private, peer, bound)).encrypt(nonce, plain, bound)


def unseal(data: bytes, private: bytes, peer: bytes, *, bound: bytes) -> bytes:
    """Inverse of `seal`. Raises MalformedBytes: other bytes, another key, or another `bound`."""
    try:
        return AESGCM(exchanged_key(private, peer, bound)).decrypt(data[:_NONCE], data[_NONCE:], bound)
    except (InvalidTag, ValueError) as error:
        raise MalformedBytes("shares that can't be opened") from error


def route(context: bytes, sender: str, receiver: str) -> bytes:
    """The `bound` of shares on their way in one attempt: it goes into their key and is authenticated."""
    return join(TAG + b" shares", context, sender.encode(), receiver.encode())
