"""A reply is checked before anything is computed from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from discreet.federated.messages import (
    MalformedMessage,
    Order,
    Reply,
    decode_order,
    decode_reply,
    encode_order,
    encode_reply,
    parameters_record,
)
from discreet.privacy.clipping import ClippedSum, GridSum
from discreet.privacy.grid import grid_for

GOOD: dict[str, float | int] = {
    "round": 3,
    "below": 1,
    "epsilon_example": 0.5,
    "epsilon_local": 0.0,
    "epsilon_local_pure": 0.0,
}


def content(array: np.ndarray | None = None, **numbers: float | int) -> RecordDict:
    values = np.array([1.0, -2.0], dtype=np.float32) if array is None else array
    return RecordDict({"update": ArrayRecord({"update": Array(values)}), "reply": MetricRecord(dict(GOOD | numbers))})


def decode(record: RecordDict) -> Reply:
    return decode_reply(record, round_number=3, num_params=2)


def test_a_reply_survives_the_wire() -> None:
    reply = Reply(3, torch.tensor([1.0, -2.0]), below=True, epsilon_example=0.5, epsilon_local=0.25)
    read = decode(encode_reply(reply))
    assert torch.equal(read.update, reply.update)
    assert (read.round, read.below, read.epsilon_example, read.epsilon_local) == (3, True, 0.5, 0.25)


def test_nothing_but_update_bit_and_epsilons_leaves_a_client() -> None:
    record = encode_reply(Reply(3, torch.zeros(2), below=False))
    assert list(record.array_records) == ["update"]
    assert set(record.metric_records["reply"]) == {
        "round",
        "below",
        "epsilon_example",
        "epsilon_local",
        "epsilon_local_pure",
    }
    assert not record.config_records


def test_an_order_survives_the_wire() -> None:
    order = Order(2, math.inf, "{}", client_id=7, state_folder="somewhere")
    read, arrays = decode_order(encode_order(order, parameters_record(torch.arange(3.0))))
    assert read == order
    assert arrays[0].tolist() == [0.0, 1.0, 2.0]


BAD = {
    "another round": content(round=2),
    "a bit that is not a bit": content(below=2),
    "half a bit": content(below=0.5),
    "a negative epsilon": content(epsilon_example=-1.0),
    "an epsilon that is NaN": content(epsilon_local=math.nan),
    "NaN": content(np.array([1.0, np.nan], dtype=np.float32)),
    "infinity": content(np.array([1.0, np.inf], dtype=np.float32)),
    "too huge for float32": content(np.array([1.0, 1e300])),
    "a wrong shape": content(np.zeros(3, dtype=np.float32)),
    "a matrix": content(np.zeros((2, 1), dtype=np.float32)),
    "integers": content(np.zeros(2, dtype=np.int64)),
    "complex numbers": content(np.zeros(2, dtype=np.complex64)),
    "strings": content(np.array(["a", "b"])),
    "nothing": RecordDict(),
    "no numbers": RecordDict({"update": ArrayRecord({"update": Array(np.zeros(2))})}),
    "no array": RecordDict({"update": ArrayRecord(), "reply": MetricRecord(dict(GOOD))}),
    "two arrays": RecordDict(
        {
            "update": ArrayRecord({"update": Array(np.zeros(2)), "more": Array(np.zeros(2))}),
            "reply": MetricRecord(dict(GOOD)),
        }
    ),
    "missing epsilon": RecordDict(
        {"update": ArrayRecord({"update": Array(np.zeros(2))}), "reply": MetricRecord({"round": 3, "below": 1})}
    ),
    "bytes that are no array": RecordDict(
        {
            "update": ArrayRecord({"update": Array("float32", (2,), "numpy.ndarray", b"garbage")}),
            "reply": MetricRecord(dict(GOOD)),
        }
    ),
}


@pytest.mark.parametrize("record", BAD.values(), ids=BAD.keys())
def test_a_malformed_reply_is_refused(record: RecordDict) -> None:
    with pytest.raises(MalformedMessage):
        decode(record)


@given(
    data=st.binary(max_size=200),
    dtype=st.sampled_from(["float32", "float64", "int8", "object", "nonsense", ""]),
    shape=st.lists(st.integers(-3, 5), max_size=3),
    stype=st.sampled_from(["numpy.ndarray", "torch", ""]),
    below=st.integers(-3, 3) | st.floats(),
    spent=st.floats(),
)
def test_no_reply_stops_the_decoder(
    data: bytes, dtype: str, shape: list[int], stype: str, below: float, spent: float
) -> None:
    numbers = MetricRecord(dict(GOOD | {"below": below, "epsilon_example": spent}))
    record = RecordDict({"update": ArrayRecord({"update": Array(dtype, tuple(shape), stype, data)}), "reply": numbers})
    with pytest.raises(MalformedMessage):
        decode(record)


@given(raw=st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=2), half=st.booleans())
def test_finite_floats_of_any_width_are_read(raw: list[float], half: bool) -> None:
    values = np.clip(np.array(raw), -6e4, 6e4).astype(np.float16 if half else np.float64)
    assert decode(content(values)).update.tolist() == values.astype(np.float32).tolist()


def test_a_pickled_object_is_not_loaded() -> None:
    import io

    file = io.BytesIO()
    np.save(file, np.array([print, print], dtype=object), allow_pickle=True)
    record = ArrayRecord({"update": Array("object", (2,), "numpy.ndarray", file.getvalue())})
    with pytest.raises(MalformedMessage):
        decode(RecordDict({"update": record, "reply": MetricRecord(dict(GOOD))}))


@pytest.mark.parametrize("field", [{"round": 0}, {"clip_norm": -1.0}, {"clip_norm": math.nan}, {"settings": 3}])
def test_a_malformed_order_is_refused_by_the_client(field: dict[str, float]) -> None:
    config = {"round": 1, "clip_norm": 1.0, "settings": "{}"} | field
    record = RecordDict({"order": ConfigRecord(dict(config)), "parameters": parameters_record(torch.zeros(2))})
    with pytest.raises(MalformedMessage):
        decode_order(record)


def test_a_vector_is_encoded_byte_for_byte_as_flower_does_it() -> None:
    vector = torch.arange(5.0)
    array = parameters_record(vector)["parameters"]
    assert array == Array(vector.numpy())


def test_finite_values_with_squares_beyond_float32_are_read() -> None:
    assert decode(content(np.array([3e38, -3e38], dtype=np.float32))).update.tolist() == pytest.approx([3e38, -3e38])


@pytest.mark.parametrize("total", [ClippedSum(2, 1.0), GridSum(2, 1.0, grid=grid_for(1.0, 2))], ids=["float", "grid"])
def test_an_update_lies_in_its_message_and_clipping_leaves_it_alone(total: ClippedSum | GridSum) -> None:
    record = content(np.array([30.0, -40.0], dtype=np.float32))
    raw = np.frombuffer(record.array_records["update"]["update"].data, dtype=np.uint8)
    before = raw.copy()
    update = decode(record).update
    assert raw.ctypes.data <= update.data_ptr() < raw.ctypes.data + raw.nbytes
    total.add(update.unsqueeze(0))
    assert total.total.tolist() == pytest.approx([0.6, -0.8], abs=1e-3)
    assert (raw == before).all()
