"""What a node keeps and reads: its state on disk, identities and lists of peers, and the form of
messages."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from discreet.deployment.certificates import make_node
from discreet.masking import wire
from discreet.masking.identity import Directory, Identity, IdentityError
from discreet.masking.node import MaskingNode
from discreet.masking.store import FolderStore, NodeState, read_state
from discreet.masking.wire import (
    MalformedBytes,
    MaskingRefused,
    Stage,
    digest,
    join,
    read_request,
    split_named,
)
from tests.masking.federation import RUN, Federation, MemoryStore, federation, identities, terms_of

ME = "node-00"


@pytest.fixture
def ours(tmp_path: Path) -> Federation:
    return federation(terms_of(3), store=lambda name: FolderStore(tmp_path / name))


def state_of(folder: Path) -> NodeState:
    saved = FolderStore(folder / ME).load(RUN)
    return read_state(saved)


def test_after_a_round_of_nodes_that_keep_nothing_in_memory_nothing_of_it_is_left(
    ours: Federation, tmp_path: Path
) -> None:
    assert ours.sum(1).names == tuple(ours.nodes)
    assert state_of(tmp_path) == NodeState(
        closed=1, charged=1, price=digest(terms_of(3).encode(), b"")
    )
    assert not list((tmp_path / ME).glob("*.new"))


def test_its_secrets_are_gone_once_its_vector_is_masked_and_the_next_rounds_stay(
    ours: Federation, tmp_path: Path
) -> None:
    exchange = ours.until(Stage.MASKED)
    assert len(state_of(tmp_path).attempts[1].secrets) == 80
    ours.answer(ME, exchange.requests[ME])
    assert state_of(tmp_path).attempts[1].secrets == b""
    ours.sum(1, then=2)
    assert {number: len(each.secrets) for number, each in state_of(tmp_path).attempts.items()} == {
        2: 80
    }


def test_only_the_owner_can_read_it(ours: Federation, tmp_path: Path) -> None:
    ours.until(Stage.SHARES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ME).iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / ME).stat().st_mode) == 0o700


def test_the_state_is_synced_before_the_reply_leaves(
    ours: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, seen = ours.until(Stage.KEYS), []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append("replace"), replace(*paths)))
    ours.answer(ME, exchange.requests[ME])
    assert seen == ["fsync", "replace", "fsync"]  # the file, its name, and the folder


def test_without_room_on_the_disk_nothing_leaves(
    ours: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ours.until(Stage.MASKED)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(MaskingRefused, match="can't be saved: No space left"):
        ours.answer(ME, exchange.requests[ME])


def test_a_release_that_is_not_paid_does_not_happen(ours: Federation, tmp_path: Path) -> None:
    exchange, spent = (
        ours.until(Stage.MASKED),
        Mock(side_effect=RuntimeError("the budget is spent")),
    )
    with pytest.raises(RuntimeError, match="the budget is spent"):
        ours.nodes[ME].answer(exchange.requests[ME], lambda _: ours.vectors[ME], spent)
    assert state_of(tmp_path).attempts[1].stage is Stage.SHARES


def test_a_damaged_state_is_refused_and_never_a_new_one(ours: Federation, tmp_path: Path) -> None:
    exchange = ours.until(Stage.SHARES)
    for damage in (b"", b"x", bytes(200)):
        (tmp_path / ME / f"{RUN}.state").write_bytes(damage)
        with pytest.raises(MaskingRefused, match="this run is damaged"):
            ours.answer(ME, exchange.requests[ME])
    FolderStore(tmp_path / ME).save(RUN, b"of another version")
    with pytest.raises(MaskingRefused, match="malformed: the state"):
        ours.answer(ME, exchange.requests[ME])


def test_two_processes_never_answer_at_once(ours: Federation, tmp_path: Path) -> None:
    exchange = ours.until(Stage.SHARES)
    with (
        FolderStore(tmp_path / ME).locked(RUN),
        pytest.raises(MaskingRefused, match="another process is answering"),
    ):
        ours.answer(ME, exchange.requests[ME])


def test_no_secret_is_shown(ours: Federation, tmp_path: Path) -> None:
    ours.until(Stage.MASKED)
    state = state_of(tmp_path)
    assert repr(state.attempts[1].secrets) not in repr(state)
    with pytest.raises(MalformedBytes) as refusal:
        read_state(state.encode().replace(b'"stage":2', b'"stage":9'))
    assert str(refusal.value.__cause__).count("input_value") == 0


def test_keys_of_scripts_certs_are_identities_and_public_keys_have_two_forms(
    tmp_path: Path,
) -> None:
    make_node(tmp_path, "one")
    one, other = Identity.read("one", tmp_path / "nodes" / "one.key"), Identity.generate("other")
    text = (
        other.key.public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )
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


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": "ssh-ed25519 AAAA"}', '{"a": "x", "a": "y"}']
)
def test_a_list_that_can_not_be_used_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(text)
    with pytest.raises(IdentityError, match=r"peers\.json"):
        Directory.read(path)


def test_two_names_with_one_key_and_names_of_another_length_are_refused() -> None:
    one = Identity.generate("one")
    for names, reason in (
        (("one", "two"), "could speak for two"),
        (("",), "1 to 200"),
        (("n" * 201,), "1 to 200"),
    ):
        with pytest.raises(IdentityError, match=reason):
            Directory.of(dict.fromkeys(names, one))


def test_a_node_starts_only_with_a_list_of_all_nodes_that_has_its_key() -> None:
    people, more = identities(3), identities(4)
    for who, list_of, reason in (
        (Identity.generate("node-00"), people, "lacks the public key of this node, 'node-00'"),
        (more["node-00"], more, "has 4 names, but the run has 3 nodes"),
    ):
        with pytest.raises(ValueError, match=reason):
            MaskingNode(who, Directory.of(list_of), terms_of(3), MemoryStore())


def test_no_private_key_is_shown() -> None:
    assert repr(Identity.generate("one")) == "Identity(name='one')"


TERMS = terms_of(3)
OURS = federation(TERMS)
REQUESTS = {stage: OURS.until(stage, round=int(stage)).requests["node-00"] for stage in Stage}
PLACE = st.integers(0, 2**16)  # modulo the length: signatures of one message differ in length


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
        st.binary(max_size=9),
        max_size=5,
    )
)
def test_names_and_values_are_read_as_they_were_written(values: dict[str, bytes]) -> None:
    assert wire.split(join(*values.values())) == list(values.values())
    assert split_named(wire.join_named(values)) == values
    assert wire.split_names(wire.join_names(values)) == tuple(sorted(values))


def test_names_in_any_other_form_are_malformed() -> None:
    lengths, order = (b"\x01", bytes(7) + b"\x05abc"), (join(b"b", b"a"), join(b"a", b"a"))
    for data in (*lengths, *order, join(b""), join(b"\xff")):
        with pytest.raises(MalformedBytes):
            wire.split_names(data)


@given(st.binary(max_size=200))
def test_other_bytes_are_malformed_and_nothing_else_is_raised(data: bytes) -> None:
    for reader in (read_request, wire.read_reply):
        with pytest.raises(MalformedBytes):
            reader(data)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_request_with_one_byte_changed_is_refused(data: st.DataObject) -> None:
    request = bytearray(REQUESTS[data.draw(st.sampled_from(list(Stage)[1:]))])
    place = data.draw(PLACE) % len(request)
    request[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MaskingRefused):
        OURS.answer("node-00", bytes(request))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_malformed_reply_is_malformed_at_every_stage(data: st.DataObject) -> None:
    stage = data.draw(st.sampled_from(list(Stage)))
    ours = federation(TERMS)
    exchange = ours.until(stage)
    reply = bytearray(ours.answer("node-00", exchange.requests["node-00"]))
    with pytest.raises(MalformedBytes):
        exchange.take("node-00", bytes(reply[: data.draw(PLACE) % len(reply)]))


def test_a_second_reply_one_of_a_stranger_and_one_to_another_request_are_malformed() -> None:
    ours = federation(TERMS)
    exchange = ours.until(Stage.KEYS)
    reply = ours.answer("node-00", exchange.requests["node-00"])
    exchange.take("node-00", reply)
    for name in ("node-00", "node-99"):
        with pytest.raises(MalformedBytes, match="was not asked"):
            exchange.take(name, reply)
    with pytest.raises(MalformedBytes, match="another request"):
        ours.until(Stage.SHARES).take("node-00", reply)


def test_a_masked_vector_can_not_be_asked_for_beside_something_else() -> None:
    ours = federation(TERMS)
    terms, (part,) = read_request(ours.until(Stage.MASKED).requests["node-00"])
    other = type(part)(Stage.KEYS, part.round + 1, bytes(16), b"")
    with pytest.raises(MaskingRefused, match="requested by itself"):
        ours.answer("node-00", wire.write_request(terms, [part, other]))


@given(st.integers(16, 32), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_packed_integers_are_read_modulo_2_to_the_k(bits: int, values: list[int]) -> None:
    data = wire.pack(np.array(values, dtype=np.uint32), bits)
    assert 0 <= 8 * len(data) - bits * len(values) <= 7 * (bits % 8)
    assert wire.unpack(data, length=len(values), bits=bits).tolist() == [
        value % 2**bits for value in values
    ]


def test_packed_integers_in_another_form_are_malformed() -> None:
    data = wire.pack(np.array([1, 2, 3], dtype=np.uint32), 17)
    for other in (data + b"\x00", data[:-1] + b"\x01"):  # longer, and with a bit of the padding
        with pytest.raises(MalformedBytes):
            wire.unpack(other, length=3, bits=17)
