"""A node's registered key and the list of the other nodes' public keys, which people have compared;
and the node's public keys for one attempt, signed with the registered key together with everything
they are bound to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from discreet.masking import wire
from discreet.masking.masks import CHECK_BYTES, KEY_BYTES, exchanged_key
from discreet.masking.wire import TAG, MalformedBytes, Part, Terms

_ECDSA = ec.ECDSA(SHA384())


class IdentityError(ValueError):
    """A key or a list of keys that can't be used. The message names the file."""


@dataclass(frozen=True)
class Identity:
    """A node's name and its long-term private key on the curve P-384, as `scripts/certs node`
    generates it."""

    name: str
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def generate(cls, name: str) -> Self:
        """A new key for one run, for simulations, where no one has compared keys."""
        return cls(name, ec.generate_private_key(ec.SECP384R1()))

    @classmethod
    def read(cls, name: str, path: Path) -> Self:
        """A key from a file, PEM or OpenSSH, without a password. IdentityError: the file can't be
        read or is not a P-384 key."""
        data = _bytes_of(path)
        load = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
        return cls(name, _on_p384(partial(load, data, None), f"the private key in {path}"))

    def sign(self, message: bytes) -> bytes:
        """ECDSA with SHA-384."""
        return self.key.sign(message, _ECDSA)

    def private_text(self) -> bytes:
        """The private key as PEM, without a password; `read` reads it."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def public_text(self) -> str:
        """The public key in OpenSSH's format, one line, for the other nodes' lists."""
        return self.key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@dataclass(frozen=True)
class Directory:
    """The names of all nodes, in ascending order, each with its public key on P-384. IdentityError:
    a name is empty or too long, or two names have the same key."""

    keys: Mapping[str, ec.EllipticCurvePublicKey]

    def __post_init__(self) -> None:
        for name in self.keys:
            if not 0 < len(name.encode()) <= 200:
                raise IdentityError(f"a node's name must have from 1 to 200 bytes (got {name!r})")
        if len({key.public_numbers() for key in self.keys.values()}) != len(self.keys):
            raise IdentityError(
                "two nodes have the same public key, so one of them could speak for two"
            )
        object.__setattr__(self, "keys", {name: self.keys[name] for name in sorted(self.keys)})

    @classmethod
    def of(cls, identities: Mapping[str, Identity]) -> Self:
        """The directory of identities that are all in this process, as in a simulation."""
        return cls({name: identity.key.public_key() for name, identity in identities.items()})

    @classmethod
    def read(cls, path: Path) -> Self:
        """A JSON object with each node's public key, PEM or OpenSSH, by name. IdentityError: the
        file is not such an object, or a key is not on P-384."""
        try:
            found = json.loads(_bytes_of(path), object_pairs_hook=_each_once)
            keys = {name: str(text).encode() for name, text in found.items()}
        except (ValueError, AttributeError, RecursionError) as error:
            raise IdentityError(
                f"{path} must be a JSON object of names and public keys, each name once"
            ) from error
        read = dict[str, ec.EllipticCurvePublicKey]()
        for name, data in keys.items():
            if data.lstrip().startswith(b"-----"):
                load = load_pem_public_key
            else:
                load = load_ssh_public_key
            read[name] = _on_p384(partial(load, data), f"the key of {name} in {path}")
        return cls(read)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in ascending order. A name's position, from 1, is the position of its Shamir
        shares."""
        return tuple(self.keys)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the names and keys: equal lists have equal digests."""
        form = Encoding.X962, PublicFormat.UncompressedPoint
        return wire.digest(
            wire.join_named({name: key.public_bytes(*form) for name, key in self.keys.items()})
        )

    def has(self, identity: Identity) -> bool:
        """True if the directory has this identity's public key under this identity's name."""
        return self.keys.get(identity.name) == identity.key.public_key()

    def verify(self, name: str, signature: bytes, message: bytes) -> bool:
        """True if `name` is in this directory and signed the message."""
        try:
            self.keys[name].verify(signature, message, _ECDSA)
        except InvalidSignature:
            return False
        return True


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IdentityError(f"{path} can't be read: {error.strerror}") from error


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)


def _on_p384(load: Callable[[], object], name: str) -> Any:
    try:
        key = load()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(
            f"{name} can't be read without a password, as PEM or OpenSSH"
        ) from error
    if not isinstance(getattr(key, "curve", None), ec.SECP384R1):
        raise IdentityError(
            f"{name} is not of the kind EC P-384, which `scripts/certs node` generates"
        )
    return key


class SignedKeys(NamedTuple):
    """The public keys of a node for one attempt, as `join` encodes them for travel.

    Attributes:
      sealing, masking: X25519 public keys, for shares in transit and for masks.
      check: the check of its seed (`masks.seed_check`).
      signature: over these, the place, the list of peers and the node's name.
    """

    sealing: bytes
    masking: bytes
    check: bytes
    signature: bytes


def sign_keys(
    identity: Identity, directory: Directory, place: bytes, values: tuple[bytes, bytes, bytes]
) -> SignedKeys:
    """Signs `values`: the public keys for shares and for masks, and the seed's check."""
    return SignedKeys(*values, identity.sign(_message(identity.name, directory, place, values)))


def is_signed(keys: SignedKeys, name: str, *, directory: Directory, place: bytes) -> bool:
    """True if `name` signed these keys for this place and list of peers with its key in this
    list."""
    return directory.verify(name, keys.signature, _message(name, directory, place, keys[:3]))


def _message(
    name: str, directory: Directory, place: bytes, values: tuple[bytes, bytes, bytes]
) -> bytes:
    return wire.join(TAG + b" keys", place, directory.digest, name.encode(), *values)


def read_keys(data: bytes) -> SignedKeys:
    """Received signed keys; the signature is not checked. MalformedBytes: the keys have wrong
    sizes, or one can't be used."""
    keys = SignedKeys(*wire.split(data, 4))
    if (len(keys.sealing), len(keys.masking), len(keys.check)) != (
        KEY_BYTES,
        KEY_BYTES,
        CHECK_BYTES,
    ):
        raise MalformedBytes("public keys of a wrong size")
    for public in (keys.sealing, keys.masking):
        exchanged_key(bytes(KEY_BYTES), public, b"")  # any private key finds one that gives zero
    return keys


def join_keys(keys: Mapping[str, SignedKeys]) -> bytes:
    """The signed keys of several nodes, by name."""
    return wire.join_named({name: wire.join(*each) for name, each in keys.items()})


def split_keys(data: bytes) -> dict[str, SignedKeys]:
    """Inverse of `join_keys`. Raises MalformedBytes: as `split_named` and `read_keys`."""
    return {name: read_keys(each) for name, each in wire.split_named(data).items()}


def attempt_bytes(terms: Terms, part: Part) -> bytes:
    """The run, round and attempt that everything in an attempt is bound to."""
    return wire.join(terms.encode(), wire.round_bytes(part.round), part.attempt)


def context_of_keys(place: bytes, keys: Mapping[str, SignedKeys]) -> bytes:
    """The digest of a place and of all signed keys in it.

    Each node's own fresh keys are among them, so nothing from another attempt fits, even if a
    server gives two attempts the same name. The server has no list of peers; the keys bind it to
    the list that they were signed for."""
    return wire.digest(TAG + b" context", place, join_keys(keys))


def context_of_vectors(context: bytes, asked: bytes) -> bytes:
    """The context of masks. `asked` is part of it, so the masks of nodes that received different
    requests do not cancel."""
    return wire.digest(TAG + b" asked", context, asked)


def survivors_message(context: bytes, alive: Iterable[str], gone: Iterable[str]) -> bytes:
    """The message that nodes sign in the confirm stage: the nodes in the sum, and the nodes that
    shared but are not in it."""
    return wire.join(TAG + b" survivors", context, wire.join_names(alive), wire.join_names(gone))
