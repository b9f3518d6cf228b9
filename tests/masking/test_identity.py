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


def test_the_keys_of_scripts_certs_are_identities_and_public_keys_are_read_in_both_forms(tmp_path: Path) -> None:
    make_node(tmp_path, "one")
    one, other = Identity.read("one", tmp_path / "nodes" / "one.key"), Identity.generate("other")
    text = other.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    peers = {"other": text, "one": (tmp_path / "public" / "one.pub").read_text()}
    (tmp_path / "peers.json").write_text(json.dumps(peers))
    directory = Directory.read(tmp_path / "peers.json")
    assert directory.names == ("one", "other")
    for each in (one, other):
        assert directory.verify(each.name, each.sign(b"message"), b"message")
        assert not directory.verify(each.name, each.sign(b"message"), b"another")


def test_a_private_key_that_can_not_be_used_is_refused_by_name(tmp_path: Path) -> None:
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    others = (ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate())
    path = tmp_path / "node.key"
    for data in (None, b"", *(key.private_bytes(*form) for key in others)):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(IdentityError, match=r"node\.key"):
            Identity.read("node", path)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "ssh-ed25519 AAAA"}', '{"a": "x", "a": "y"}'])
def test_a_list_that_can_not_be_used_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(text)
    with pytest.raises(IdentityError, match=r"peers\.json"):
        Directory.read(path)


def test_two_names_with_one_key_and_names_of_another_length_are_refused() -> None:
    one = Identity.generate("one")
    for names, reason in ((("one", "two"), "could speak for two"), (("",), "1 to 200"), (("n" * 201,), "1 to 200")):
        with pytest.raises(IdentityError, match=reason):
            Directory.of(dict.fromkeys(names, one))


def test_a_node_starts_only_with_a_list_of_all_nodes_that_has_its_key() -> None:
    people, more = identities(3), identities(4)
    for who, list_of, reason in (
        (Identity.generate("node-00"), people, "not the public key of 'node-00'"),
        (more["node-00"], more, "has 4 names, and the run has 3 nodes"),
    ):
        with pytest.raises(ValueError, match=reason):
            MaskingNode(who, Directory.of(list_of), terms_of(3), MemoryStore())


def test_no_private_key_is_shown() -> None:
    assert repr(Identity.generate("one")) == "Identity(name='one')"
