"""Masks: streams of AES-256 in counter mode under fresh keys, as words that are added modulo 2^32.
Their secrets are split into shares, of which t open a secret and t - 1 reveal nothing (Shamir
1979), by PyCryptodome, and are sealed for transit.

The low k bits of a uniform word are uniform modulo 2^k, so that one stream serves every k up to
32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from discreet.masking.wire import TAG, MalformedBytes, Words, join, join_names

KEY_BYTES = 32
SEED_BYTES = 16
CHECK_BYTES = 16
_BLOCK = 16  # bytes: the field of PyCryptodome's Shamir is GF(2^128)
_NONCE = 12
_CHUNK = 1 << 16  # words: 256 KiB, which stays in a core's cache between the cipher and the sum


def public_key(private: bytes) -> bytes:
    """The X25519 public key of a private key, which is any 32 random bytes (RFC 7748)."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def exchanged_key(private: bytes, peer: bytes, info: bytes) -> bytes:
    """32 bytes derived from a private X25519 key, a peer's public key and `info`, by HKDF with
    SHA-256. MalformedBytes: `peer` is not a public key, or one with which every exchange gives
    zero."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(peer)
        )
    except ValueError as error:
        raise MalformedBytes("a public key that can't be used") from error
    return _derived(shared, info, KEY_BYTES)


def own_key(seed: bytes, context: bytes) -> bytes:
    """The key of a node's own mask in one attempt, derived from its seed of 16 bytes."""
    return _derived(seed, join(TAG + b" own", context), KEY_BYTES)


def seed_check(seed: bytes) -> bytes:
    """16 public bytes that detect a seed combined from wrong shares.

    The check and the mask's key are outputs of HKDF for different `info`, so neither reveals
    anything about the other."""
    return _derived(seed, TAG + b" check", CHECK_BYTES)


def _derived(secret: bytes, info: bytes, size: int) -> bytes:
    return HKDF(SHA256(), size, None, info).derive(secret)


def add_mask(total: Words, key: bytes, *, subtract: bool) -> None:
    """Adds the stream of a key, 4 bytes a word, to `total` in place, or subtracts it, modulo 2^32.

    A key is for one stream, so the counter begins at zero.
    """
    cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()
    zeros = bytes(4 * min(_CHUNK, len(total)))
    stream = bytearray(4 * _CHUNK + 15)
    change = np.subtract if subtract else np.add
    for start in range(0, len(total), _CHUNK):
        part = total[start : start + _CHUNK]
        cipher.update_into(memoryview(zeros)[: 4 * len(part)], stream)
        change(part, np.frombuffer(stream, dtype="<u4", count=len(part)), out=part)


def add_pair_masks(
    total: Words, private: bytes, name: str, peers: Mapping[str, bytes], *, context: bytes
) -> None:
    """Adds the masks that a node shares with its peers, by their public keys. Of two nodes, one
    adds the mask and the other subtracts it. MalformedBytes: as in `exchanged_key`."""
    for peer, public in peers.items():
        key = exchanged_key(
            private, public, join(TAG + b" pair", context) + join_names((name, peer))
        )
        add_mask(total, key, subtract=name > peer)


def split_secret(secret: bytes, *, threshold: int, count: int) -> list[bytes]:
    """A share for each of the positions 1 .. count, as long as the secret, whose length is a
    multiple of 16 bytes.

    >>> shares = split_secret(bytes(range(32)), threshold=2, count=3)
    >>> combine({1: shares[0], 3: shares[2]}) == bytes(range(32))
    True
    """
    blocks = (secret[start : start + _BLOCK] for start in range(0, len(secret), _BLOCK))
    columns = (
        [share for _, share in Shamir.split(threshold, count, block, False)] for block in blocks
    )
    return [b"".join(row) for row in zip(*columns, strict=True)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from exactly `threshold` shares by position; wrong shares give wrong bytes."""
    size = len(next(iter(shares.values())))
    return b"".join(
        Shamir.combine(
            [(place, share[start : start + _BLOCK]) for place, share in shares.items()], False
        )
        for start in range(0, size, _BLOCK)
    )


def seal(plain: bytes, private: bytes, peer: bytes, *, bound: bytes) -> bytes:
    """AES-256-GCM under a key that both X25519 keys give, for this `route` alone: nonce, then
    ciphertext and tag. MalformedBytes: `peer` is not a usable public key."""
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(exchanged_key(private, peer, bound)).encrypt(nonce, plain, bound)


def unseal(data: bytes, private: bytes, peer: bytes, *, bound: bytes) -> bytes:
    """Inverse of `seal`. MalformedBytes: wrong bytes, another key, or another `bound`."""
    try:
        return AESGCM(exchanged_key(private, peer, bound)).decrypt(
            data[:_NONCE], data[_NONCE:], bound
        )
    except (InvalidTag, ValueError) as error:
        raise MalformedBytes("shares that can't be opened") from error


def route(context: bytes, sender: str, receiver: str) -> bytes:
    """The `bound` of shares in transit in one attempt. It goes into their key and is
    authenticated."""
    return join(TAG + b" shares", context, sender.encode(), receiver.encode())
