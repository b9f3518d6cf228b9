"""Keys that nodes registered with, and the list of the others' keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from discreet.deployment.certificates import make_node
from discreet.masking.identity import Directory, Identity, IdentityError
from discreet.masking.node import MaskingNode
from tests.masking.federation import MemoryStore, identities, terms_of


def pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_the_keys_of_scripts_certs_are_identities(tmp_path: Path) -> None:
    make_node(tmp_path, "node-0")
    one = Identity.read("node-0", tmp_path / "nodes" / "node-0.key")
    (tmp_path / "peers.json").write_text(json.dumps({"node-0": (tmp_path / "public" / "node-0.pub").read_text()}))
    directory = Directory.read(tmp_path / "peers.json")
    assert directory.verify("node-0", one.sign(b"message"), b"message")
    assert not directory.verify("node-0", one.sign(b"message"), b"another")


def test_public_keys_are_read_in_both_forms(tmp_path: Path) -> None:
    one, other = Identity.generate("one"), Identity.generate("other")
    text = other.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    (tmp_path / "peers.json").write_text(json.dumps({"other": text, "one": one.public_text()}))
    directory = Directory.read(tmp_path / "peers.json")
    assert directory.names == ("one", "other")
    assert directory.verify("other", other.sign(b"m"), b"m")
    assert directory.verify("one", one.sign(b"m"), b"m")


@pytest.mark.parametrize("kind", ["missing", "empty", "another curve", "another kind"])
def test_a_private_key_that_can_not_be_used_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "node.key"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "another curve":
        path.write_bytes(pem(ec.generate_private_key(ec.SECP256R1())))
    elif kind == "another kind":
        path.write_bytes(pem(Ed25519PrivateKey.generate()))
    with pytest.raises(IdentityError, match=r"node\.key"):
        Identity.read("node", path)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "ssh-ed25519 AAAA"}', '{"a": "x", "a": "y"}'])
def test_a_list_that_can_not_be_used_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(text)
    with pytest.raises(IdentityError, match=r"peers\.json"):
        Directory.read(path)


def test_two_names_with_one_key_are_refused() -> None:
    one = Identity.generate("one")
    with pytest.raises(IdentityError, match="could speak for two"):
        Directory.of({"one": one, "two": one})


@pytest.mark.parametrize("name", ["", "n" * 201])
def test_names_have_a_length(name: str) -> None:
    with pytest.raises(IdentityError, match="from 1 to 200 bytes"):
        Directory.of({name: Identity.generate(name)})


def test_a_node_that_the_list_has_with_another_key_does_not_start() -> None:
    directory = Directory.of(identities(3))
    with pytest.raises(ValueError, match="not the public key of 'node-00'"):
        MaskingNode(Identity.generate("node-00"), directory, terms_of(3), MemoryStore())


def test_a_list_of_another_length_than_the_runs_number_of_nodes_is_refused() -> None:
    people = identities(4)
    with pytest.raises(ValueError, match="has 4 names, and the run has 3 nodes"):
        MaskingNode(people["node-00"], Directory.of(people), terms_of(3), MemoryStore())


def test_no_private_key_is_shown() -> None:
    assert repr(Identity.generate("one")) == "Identity(name='one')"
