"""Contents that a hostile node could send, drawn at random: wrong arrays, numbers, records and
headers."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict

GOOD_SHAPE = "(2,)"
MANY_NINES = "9" * 4200
HEADERS = (
    "(",
    "[" * 2000,
    "-" * 9000,
    '"""',
    "0xg",
    "a\n  b\n c",
    "\0",
    "(" * 65535,
    " " * 60000,
    "{'descr': __import__('os').abort()}",
    *(
        f"{{'descr': {kind}, 'fortran_order': False, 'shape': {GOOD_SHAPE}, }}"
        for kind in (
            "'|O'",
            "'S4'",
            "'V0'",
            "'<M8[s]'",
            "[('a', '<f4')]",
            "('<f4', (2,))",
            "'" + "i4," * 3000 + "'",
        )
    ),
    *(
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        for shape in (
            "(True, 2)",
            "2",
            "(-2,)",
            "(10**12,)",
            "(4L,)",
            "(99999999999999,)",
            "(2,)" + " " * 2000,
            f"({MANY_NINES},)",
            f"({MANY_NINES}, {MANY_NINES})",
            "(" + "1, " * 70 + "2)",
        )
    ),
    f"{{'descr': '<f4', 'fortran_order': 3, 'shape': {GOOD_SHAPE}, }}",
    f"{{'descr': '<f4', 'fortran_order': False, 'shape': {GOOD_SHAPE}, 'x': 1, }}",
)
NUMBERS = (
    0,
    1,
    2,
    -1,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    10**18,
    -(10**18),
    1e308,
    [1],
    [],
    [0.5, 1.0],
    [0] * 9999,
)
NAMES = ("../../x", "", "update\0", "\x1b[31mred" * 99, "0")
SAID = ("\x1b[31mred\x07" * 20, "a" * 10**6, "", "line1\nline2", "\u202e evil")


def npy(header: str, values: bytes = bytes(8)) -> bytes:
    """An array in NumPy's format with any header."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + min(len(text), 65535).to_bytes(2, "little") + text + values


def raw(data: bytes) -> Array:
    """An array of these bytes."""
    return Array(dtype="float32", shape=(2,), stype="numpy.ndarray", data=data)


def wrong_array(random: Random, shape: tuple[int, ...] = (2,)) -> Array:
    """An array of which nothing is right, or nearly nothing."""
    kinds: list[Callable[[], Array]] = [
        lambda: raw(npy(random.choice(HEADERS))),
        lambda: raw(
            random.choice(
                [b"", bytes(99), b"\x93NUMPY\x02\x00\xff\xff\xff\xff", b"\x93NUMPY\x09\x00"]
            )
        ),
        lambda: Array(np.full(shape, random.choice([np.nan, np.inf, 1e38, 1e-45]), np.float32)),
        lambda: Array(np.full(shape, random.choice([1e308, -1e308]))),
        lambda: Array(np.zeros((*shape, random.choice([0, 2])), np.float32)),
        lambda: Array(np.zeros(shape, random.choice([">f4", "c16", "i8", "f2", "?", "S4"]))),
        lambda: raw(_spoilt(bytes(Array(np.zeros(shape, np.float32)).data), random)),
    ]
    return random.choice(kinds)()


def _spoilt(data: bytes, random: Random) -> bytes:
    spoilt = bytearray(data)
    match random.choice(["flip", "cut", "zero", "longer", "empty"]):
        case "flip":
            spoilt[random.randrange(len(spoilt))] ^= 1 << random.randrange(8)
        case "cut":
            del spoilt[random.randrange(len(spoilt)) :]
        case "zero":
            spoilt[random.randrange(len(spoilt))] = 0
        case "longer":
            spoilt += bytes(100)
        case "empty":
            spoilt.clear()
    return bytes(spoilt)


def spoil_parts(parts: dict[str, bytes], random: Random) -> None:
    """Changes the bytes of a message's parts, as a node can that writes Flower's objects by
    itself."""
    for _ in range(random.choice([1, 1, 3, 20])):
        name = random.choice(list(parts))
        parts[name] = (
            _spoilt(parts[name], random) if parts[name] else parts[random.choice(list(parts))]
        )


def wrong_content(content: RecordDict, random: Random) -> RecordDict | Error | None:
    """A node's content with something wrong in it."""
    name = random.choice(list(content))
    record = content[name]
    if random.random() < 0.15:
        return random.choice(
            [RecordDict(), Error(random.choice([0, 2, 451, -1, 2**31 - 1]), random.choice(SAID))]
        )
    if random.random() < 0.15:
        content.pop(name)
        content[random.choice(["x" * 1000, name])] = random.choice(
            [MetricRecord({"a": 1}), ConfigRecord({"a": "b"})]
        )
    elif isinstance(record, ArrayRecord):
        content[name] = _wrong_arrays(record, random)
    elif isinstance(record, MetricRecord):
        content[name] = MetricRecord(
            {**record, random.choice([*record, "new"]): random.choice(NUMBERS)}
        )
    else:
        content[name] = _wrong_config(record, random)
    return content


def _wrong_arrays(record: ArrayRecord, random: Random) -> ArrayRecord:
    arrays = dict(record.items())
    name = random.choice(list(arrays))
    match random.choice(["wrong"] * 5 + ["less", "more", "named", "turned"]):
        case "wrong":
            arrays[name] = wrong_array(random, tuple(arrays[name].shape))
        case "less":
            arrays.pop(name)
        case "more":
            arrays["more"] = Array(np.zeros(2, np.float32))
        case "named":
            arrays[random.choice(NAMES)] = arrays.pop(name)
        case "turned":
            arrays = dict(reversed(arrays.items()))
    return ArrayRecord(arrays)


def _wrong_config(record: ConfigRecord, random: Random) -> ConfigRecord:
    values = dict(record.items())
    name = random.choice(list(values))
    value = values[name]
    if isinstance(value, bytes) and random.random() < 0.8:
        values[name] = _spoilt(value, random)
    elif isinstance(value, list) and random.random() < 0.5:
        values[name] = random.sample(value, len(value) - 1)
    else:
        values[name] = random.choice([b"", "", [""], [b"x"], random.choice(NAMES), 7])
    return ConfigRecord(values)
