"""What travels to a client is what it needs; a reply is checked before anything is computed from
it."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from discreet.flower.serving import decode_reply, encode_request, parameters_record
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.grid import grid_for
from discreet.protocol.messages import (
    VERSION,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
    decode_request,
    header_of,
    request_items,
    request_of,
)
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import DataConfig, NormaliserConfig
from discreet.settings.privacy import (
    ExamplePrivacyConfig,
    LocalPrivacyConfig,
    PrivacyConfig,
    UserPrivacyConfig,
)
from discreet.settings.settings import RayConfig, Settings, client_settings
from discreet.settings.training import ModelConfig, TaskConfig
from tests.flower.hostile import HEADERS, npy, raw
from tests.node.clients import encode_reply, request_with

SPENT: dict[str, float | int] = {
    "epsilon_example": 0.5,
    "epsilon_local": 0.0,
    "epsilon_local_pure": 0.0,
}
GOOD: dict[str, float | int] = {"round": 3, "below": 1, **SPENT}
ZEROS = Array(np.zeros(2))


def content(array: np.ndarray | None = None, **numbers: float | int) -> RecordDict:
    values = np.array([1.0, -2.0], dtype=np.float32) if array is None else array
    return reply_of({"update": Array(values)}, GOOD | numbers)


def reply_of(arrays: dict[str, Array], numbers: dict[str, float | int] = GOOD) -> RecordDict:
    return RecordDict({"update": ArrayRecord(arrays), "reply": MetricRecord(dict(numbers))})


def decode(record: RecordDict) -> TrainReply:
    return decode_reply(record, round_number=3, num_params=2)


def test_a_reply_survives_the_wire() -> None:
    reply = TrainReply(
        3, torch.tensor([1.0, -2.0]), below=True, epsilon_example=0.5, epsilon_local=0.25
    )
    record = encode_reply(reply)
    read = decode(record)
    assert torch.equal(read.update, reply.update)
    assert (read.round, read.below, read.epsilon_example, read.epsilon_local) == (
        3,
        True,
        0.5,
        0.25,
    )
    # Nothing else leaves a client.
    assert [*record.array_records, *record.metric_records, *record.config_records] == [
        "update",
        "reply",
    ]
    assert {*record.metric_records["reply"]} == {*GOOD}


REQUEST = TrainRequest(2, math.inf, client_settings(Settings()))
SCHEDULED = Settings(
    rounds=2,
    privacy=PrivacyConfig(
        user=UserPrivacyConfig(enabled=False),
        local=LocalPrivacyConfig("laplace", epsilon=2.0, schedule=[1, 2]),
        example=ExamplePrivacyConfig(enabled=True, target_epsilon=3.0, max_epsilon=4.0),
    ),
)
REQUESTS = {
    "of the default run": REQUEST,
    "with every client-side guarantee": TrainRequest(1, 0.3, client_settings(SCHEDULED)),
    "with weights of classes": replace(
        REQUEST, run=replace(REQUEST.run, task=TaskConfig(class_weights=[1.0, 2.5]))
    ),
    "that normalises": replace(
        REQUEST, run=replace(REQUEST.run, normaliser=NormaliserConfig([1.5, -2.0], [3.0, 0.5]))
    ),
    "of a simulation": replace(
        REQUEST, virtual=VirtualClient(7, "somewhere", "t", seed=3, data_path="there")
    ),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_request_survives_the_wire(request_: TrainRequest) -> None:
    read, params = decode_request(encode_request(request_, parameters_record(torch.arange(3.0))))
    assert read == request_
    assert params.tolist() == [0.0, 1.0, 2.0]


# What a run asks, by group of its settings.
ASKED = {
    "": "rounds delta accountant noise",
    "model": "name freeze lora.kind lora.rank lora.alpha lora.targets",
    "data": "agreed name site num_clients partition alpha partition_seed normalise examples_per_client "
    "public_num_examples path",
    "task": "huber_delta loss class_weights",
    "training": "epochs batch_size learning_rate momentum optimizer weight_decay schedule",
    "user": "enabled sampling probability population_size aggregation adaptive "
    "noise_multiplier max_epsilon count_stddev groups correlation.kind correlation.bandwidth",
    "evaluation": "kind every cohort share metrics noise_multiplier",
    "example": "enabled aggregation clip_norm noise_multiplier target_epsilon max_epsilon unit "
    "rows_per_owner",
    "local": "kind clip_norm schedule epsilon noise_multiplier max_epsilon",
    "secure": "dropouts colluding threshold",
    "statistics": "of noise_multiplier most_examples only low high",
    "normaliser": "means deviations",
}
TRAVELS = {
    "round",
    "clip_norm",
    "work.trains",
    "work.query",
    "virtual",
    "frozen",
    *(
        ".".join(filter(None, ("run", group, name)))
        for group, names in ASKED.items()
        for name in names.split()
    ),
}


def test_no_more_than_a_client_needs_travels_to_it_and_no_path_or_host() -> None:
    secret = Settings(
        seed=77531,
        model=ModelConfig("hf:/srv/weights"),
        data=DataConfig("folder", path="/srv/data", num_clients=40, public_num_examples=50),
        ray=RayConfig(address="head.example:9099"),
        privacy=PrivacyConfig(user=UserPrivacyConfig(noise_multiplier=1.0, max_epsilon=3.0)),
    )
    items = request_items(TrainRequest(1, 0.3, client_settings(secret)))
    assert list(items) == ["version", "request"]
    assert {*names_of(json.loads(str(items["request"])))} == TRAVELS
    assert not [word for word in ("/srv", "head.example", "9099", "77531") if word in str(items)]


def names_of(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield from (
            names_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
        )


def changed(change: dict[str, object]) -> RecordDict:
    version = {"version": change["version"]} if "version" in change else {}
    items = (
        request_with(REQUEST, {name: value for name, value in change.items() if name != "version"})
        | version
    )
    return RecordDict(
        {"request": ConfigRecord(items), "parameters": parameters_record(torch.zeros(2))}
    )  # type: ignore[arg-type]


UNREADABLE = {
    "train request has version 5, this client reads version 9": {"version": 5},
    "train request has version gone, this client reads version 9": {"version": "gone"},
    "unknown setting privacy.example.sampled_twice": {"run.example.sampled_twice": True},
    "unknown setting sampled": {"sampled": True},
    "task.class_weights must be a list of numbers within [1e-09, 1e+09]": {
        "run.task.class_weights": [1.0, -1.0]
    },
    "clip_norm must be within [1e-09, 1e+09] (got -1": {"clip_norm": -1.0},
    "clip_norm must be within [1e-09, 1e+09] (got nan": {"clip_norm": math.nan},
    # A node would plan such a run, before it says no, for longer than a round takes.
    "rounds must be within [1, 100000] (got 1000000000000": {"run.rounds": 10**12},
    "round must be within [1, 100000] (got 1000000000000": {"round": 10**12},
    "training.epochs must be within [1, 1e+09] (got 1000000000000": {"run.training.epochs": 10**12},
    "sampling.population_size must be within [1, 1e+09] (got 1000000000000": {
        "run.user.population_size": 10**12
    },
    "privacy.delta must be given": {"run.delta": "gone"},
    "privacy.delta must be below 1 / population_size": {"run.delta": 0.5},
    "every setting once": {"run.example.enabled": "gone"},
    # No comparison with a policy's least noise is true of NaN.
    "privacy.user.noise_multiplier must be 0 or within [1e-09, 1e+09] (got nan": {
        "run.user.noise_multiplier": math.nan
    },
    "data.path must be omitted": {"run.data.path": "/etc"},
    "work.trains must be true or false": {"work.trains": 1},
    "virtual.client_id must be at least 0": {"virtual.client_id": -1, "virtual.state_folder": ""},
}


@pytest.mark.parametrize(("message", "change"), UNREADABLE.items(), ids=UNREADABLE.keys())
def test_a_request_that_a_client_can_not_follow_is_refused_in_one_line(
    message: str, change: dict[str, object]
) -> None:
    with pytest.raises(MalformedMessage, match=re.escape(message)) as refused:
        decode_request(changed(change))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "[" * 10**5, "{}", "7", None, b"{}", '{"round": 1, "round": 1}']
)
def test_a_text_that_is_no_request_is_refused(text: object) -> None:
    with pytest.raises(MalformedMessage):
        request_of({"version": VERSION, "request": text})
    with pytest.raises(MalformedMessage, match="holds more, "):
        request_of({**request_items(REQUEST), "more": text})


def test_a_request_that_says_a_thing_twice_is_refused() -> None:
    # Whoever reads it first may take the one, and whoever acts on it the other.
    twice = str(request_items(REQUEST)["request"]).replace(
        '"delta": 0.001', '"delta": 0.5, "delta": 0.001'
    )
    with pytest.raises(MalformedMessage, match="every setting once"):
        request_of({"version": VERSION, "request": twice})


SHARES = {"run.delta", "run.user.probability", "run.evaluation.share", "run.training.momentum"}
SIGNED = {"run.statistics.low", "run.statistics.high", "run.normaliser.means"}


def numbers_of(kind: type, prefix: str) -> Iterator[tuple[str, bool]]:
    """Every number that travels and is not whole, and whether it travels in a list."""
    for part, wanted in get_type_hints(kind).items():
        kinds, name = {wanted, *get_args(wanted)}, prefix + part
        if is_dataclass(wanted):
            yield from numbers_of(wanted, f"{name}.")  # type: ignore[arg-type]
        elif kinds & {float, list[float]}:
            yield name, float not in kinds


@pytest.mark.parametrize(
    ("name", "in_list"), [("clip_norm", False), *numbers_of(ClientSettings, "run.")]
)
def test_a_number_that_float32_does_not_bear_is_refused_whatever_it_is(
    name: str, in_list: bool
) -> None:
    small = () if name in SHARES | SIGNED else (1e-40, 1e-10)
    for value in (math.nan, 1e39, -1e39, *([] if name == "clip_norm" else [math.inf]), *small):
        with pytest.raises(MalformedMessage, match=rf"{name.split('.')[-1]} must be"):
            decode_request(changed({name: [value] if in_list else value}))


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([print, print], dtype=object), allow_pickle=True)
    return file.getvalue()


BAD = {
    "another round": content(round=2),
    "a bit that is not a bit": content(below=2),
    "a negative epsilon": content(epsilon_example=-1.0),
    "an epsilon that is NaN": content(epsilon_local=math.nan),
    "NaN": content(np.array([1.0, np.nan], dtype=np.float32)),
    "too huge for float32": content(np.array([1.0, 1e300])),
    "a wrong shape": content(np.zeros(3, dtype=np.float32)),
    "integers": content(np.zeros(2, dtype=np.int64)),
    "no numbers": RecordDict({"update": ArrayRecord({"update": ZEROS})}),
    "no array": reply_of({}),
    "two arrays": reply_of({"update": ZEROS, "more": ZEROS}),
    "missing epsilon": reply_of({"update": ZEROS}, {"round": 3, "below": 1}),
    "bytes that are no array": reply_of(
        {"update": Array("float32", (2,), "numpy.ndarray", b"garbage")}
    ),
    "a pickled object": reply_of({"update": Array("object", (2,), "numpy.ndarray", pickled())}),
}


@pytest.mark.parametrize("record", BAD.values(), ids=BAD.keys())
def test_a_malformed_reply_is_refused(record: RecordDict) -> None:
    with pytest.raises(MalformedMessage):
        decode(record)


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_numpy_does_not_write_is_malformed_and_in_few_words(header: str) -> None:
    with pytest.raises(MalformedMessage) as refused:
        decode(reply_of({"update": raw(npy(header))}))
    assert len(str(refused.value)) < 600


@given(
    dtype=st.sampled_from(["<f2", "<f4", "<f8", "|b1", "<i8"]),
    shape=st.lists(st.integers(0, 3), max_size=6),
)
def test_every_header_that_numpy_writes_is_read(dtype: str, shape: list[int]) -> None:
    for order in ("C", "F"):
        values = np.zeros(shape, dtype, order)  # type: ignore[call-overload]
        found, by_columns, kind, start = header_of(Array(values), "update")
        assert found == tuple(shape)
        assert kind == values.dtype
        assert by_columns == (not values.flags.c_contiguous)
        assert start == len(Array(values).data) - values.nbytes


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
    numbers = GOOD | {"below": below, "epsilon_example": spent}
    with pytest.raises(MalformedMessage):
        decode(reply_of({"update": Array(dtype, tuple(shape), stype, data)}, numbers))


@pytest.mark.parametrize(
    "total", [ClippedSum(2, 1.0), ClippedSum(2, 1.0, grid=grid_for(1.0, 2))], ids=["float", "grid"]
)
def test_clipping_an_update_leaves_its_message_alone(total: ClippedSum) -> None:
    record = content(np.array([30.0, -40.0], dtype=np.float32))
    raw = np.frombuffer(record.array_records["update"]["update"].data, dtype=np.uint8)
    before = raw.copy()
    update = decode(record).update
    total.add(update.unsqueeze(0))
    assert total.total.tolist() == pytest.approx([0.6, -0.8], abs=1e-3)
    assert (raw == before).all()
