"""Bytes of messages: one form for one message, and nothing else is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discreet.masking import wire
from discreet.masking.wire import MalformedBytes, MaskingRefused, Stage, join, read_request, split_named
from tests.masking.federation import federation, terms_of

TERMS = terms_of(3)
OURS = federation(TERMS)
REQUESTS = {stage: OURS.until(stage, round=int(stage)).requests["node-00"] for stage in Stage}
PLACE = st.integers(0, 2**16)  # modulo the length: signatures of one message differ in length


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), st.binary(max_size=9), max_size=5)
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
        with pytest.raises(MalformedBytes, match="was not asked, or has answered"):
            exchange.take(name, reply)
    with pytest.raises(MalformedBytes, match="another request"):
        ours.until(Stage.SHARES).take("node-00", reply)


def test_a_masked_vector_can_not_be_asked_for_beside_something_else() -> None:
    ours = federation(TERMS)
    terms, (part,) = read_request(ours.until(Stage.MASKED).requests["node-00"])
    other = type(part)(Stage.KEYS, part.round + 1, bytes(16), b"")
    with pytest.raises(MaskingRefused, match="asked for by itself"):
        ours.answer("node-00", wire.write_request(terms, [part, other]))


@given(st.integers(16, 32), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_packed_integers_are_read_modulo_2_to_the_k(bits: int, values: list[int]) -> None:
    data = wire.pack(np.array(values, dtype=np.uint32), bits)
    assert 0 <= 8 * len(data) - bits * len(values) <= 7 * (bits % 8)
    assert wire.unpack(data, length=len(values), bits=bits).tolist() == [value % 2**bits for value in values]


def test_packed_integers_in_another_form_are_malformed() -> None:
    data = wire.pack(np.array([1, 2, 3], dtype=np.uint32), 17)
    for other in (data + b"\x00", data[:-1] + b"\x01"):  # longer, and with a bit of the padding
        with pytest.raises(MalformedBytes):
            wire.unpack(other, length=3, bits=17)
