"""The terms of masked sums, the errors that can end one, and the encoding of requests and replies:
fields with their lengths, read strictly, so that each message has exactly one encoding."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

TAG = b"discreet masking 2"
ATTEMPT_BYTES = 16
MOST_ROUND = 2**63 - 1
_LENGTH_BYTES = 8
_ROUND_BYTES = 8

Words = NDArray[np.uint32]


class MaskingRefused(Exception):
    """A node refuses to answer. The message gives the reason; it contains no secret and may be sent
    to the server."""


class Abandoned(Exception):
    """Too few nodes are left, so the sum can't be opened. The message says at which stage."""


@dataclass(frozen=True)
class Terms:
    """The public constants of a run's masked sums.

    Args:
      run: 32 hexadecimal digits, drawn by the server for one run of its process.
      nodes: n, the number of nodes that take part, from 3 to 100.
      dropouts: d, the number of them that may be lost when a sum is opened.
      colluding: c, the number of nodes that may tell the server, or each other, everything they
        know.
      threshold: t, the number of nodes whose shares open a secret: n + c < 2t, so that two sets of
        t nodes have an honest one in common and the server can't gather shares for two lists of
        survivors, and t <= n - d.
      bits: k, sums are modulo 2^k, from 16 to 32.
      length: the length of each vector, at most 2^31.
      variance: the variance of the noise that each node adds to each coordinate, an integer of at
        most 2^64; 0 for no noise. Nodes sign it, so a server can't announce a different noise to
        each of them: a node's account relies on the others' noise too.
      settings: SHA-256, in hexadecimal digits, of all other settings that decide a sum; empty if
        there are none.

    Raises:
      ValueError: a number is out of its range.
    """

    run: str
    nodes: int
    dropouts: int
    colluding: int
    threshold: int
    bits: int
    length: int
    variance: int = 0
    settings: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", self.run):
            raise ValueError("run must be 32 hexadecimal digits")
        if not re.fullmatch(r"([0-9a-f]{64})?", self.settings):
            raise ValueError("settings must be 64 hexadecimal digits, or empty")
        self._check("nodes", 3, 100)
        self._check("dropouts", 0, self.nodes - 1)
        self._check("colluding", 0, self.nodes - 1 - self.dropouts)
        self._check("threshold", (self.nodes + self.colluding) // 2 + 1, self.survivors)
        self._check("bits", 16, 32)
        self._check("length", 1, 2**31)
        self._check("variance", 0, 2**64)

    def _check(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be an integer from {least} to {most} (got {value!r})")

    @property
    def survivors(self) -> int:
        """n - d: a sum of fewer vectors is never opened."""
        return self.nodes - self.dropouts

    @property
    def summands(self) -> int:
        """n - d - c: the least number of honest nodes' vectors in a sum."""
        return self.survivors - self.colluding

    def encode(self) -> bytes:
        """The text of a set of terms; equal terms have equal texts."""
        return " ".join(str(value) for value in astuple(self)).encode()

    def difference(self, other: Terms) -> str | None:
        """The first field in which `other` differs, with both values; None if all are equal."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs} in the request and {mine} here"
        return None


class MalformedBytes(ValueError):
    """Bytes that no participant that follows the protocol sends."""


class Stage(IntEnum):
    """The steps of one attempt, in their order."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    CONFIRM = 4
    UNMASK = 5


@dataclass(frozen=True)
class Part:
    """One stage of one attempt at one round. `body` is the question in a request and the answer in
    a reply."""

    stage: Stage
    round: int
    attempt: bytes
    body: bytes

    def answered(self, body: bytes) -> Part:
        """The reply to this part."""
        return Part(self.stage, self.round, self.attempt, body)

    def encode(self) -> bytes:
        """The part as four fields."""
        return join(bytes([self.stage]), round_bytes(self.round), self.attempt, self.body)


def join(*values: bytes) -> bytes:
    """The values in order, each after its length: different lists give different bytes."""
    return b"".join(len(value).to_bytes(_LENGTH_BYTES, "big") + value for value in values)


def split(data: bytes, count: int | None = None) -> list[bytes]:
    """Inverse of `join`. MalformedBytes: the lengths do not fit, or there are not `count`
    values."""
    values = []
    place = 0
    while place < len(data):
        start = place + _LENGTH_BYTES
        place = start + int.from_bytes(data[place:start], "big")
        if start > len(data) or place > len(data):
            raise MalformedBytes("a field is longer than its container")
        values.append(data[start:place])
    if count is not None and len(values) != count:
        raise MalformedBytes(f"{len(values)} fields instead of {count}")
    return values


def join_names(names: Iterable[str]) -> bytes:
    """Names in ascending order."""
    return join(*(name.encode() for name in sorted(names)))


def split_names(data: bytes) -> tuple[str, ...]:
    """Inverse of `join_names`. MalformedBytes: invalid names, not in ascending order, or one occurs
    twice."""
    return _names(split(data))


def join_named(values: Mapping[str, bytes]) -> bytes:
    """Names with a value each, in ascending order."""
    return join(*(each for name in sorted(values) for each in (name.encode(), values[name])))


def split_named(data: bytes) -> dict[str, bytes]:
    """Inverse of `join_named`. Raises MalformedBytes: as `split_names`."""
    fields = split(data)
    if len(fields) % 2:
        raise MalformedBytes("a name without a value")
    return dict(zip(_names(fields[::2]), fields[1::2], strict=True))


def _names(fields: list[bytes]) -> tuple[str, ...]:
    try:
        names = tuple(field.decode() for field in fields)
    except UnicodeDecodeError as error:
        raise MalformedBytes("a name that is not text") from error
    if any(first >= second for first, second in itertools.pairwise(names)) or "" in names:
        raise MalformedBytes("names that are not in ascending order, each once")
    return names


def write_request(terms: Terms, parts: Sequence[Part]) -> bytes:
    """A request to one node: the terms, and one part or two."""
    return join(TAG + b" request", terms.encode(), *(part.encode() for part in parts))


def read_request(data: bytes) -> tuple[Terms, tuple[Part, ...]]:
    """Inverse of `write_request`. MalformedBytes: it is not a request."""
    fields = _tagged(data, b" request")
    if not fields:
        raise MalformedBytes("a request without terms")
    return _read_terms(fields[0]), tuple(_read_part(field) for field in fields[1:])


def write_reply(parts: Sequence[Part]) -> bytes:
    """A node's reply: an answer for each part of the request."""
    return join(TAG + b" reply", *(part.encode() for part in parts))


def read_reply(data: bytes) -> tuple[Part, ...]:
    """Inverse of `write_reply`. MalformedBytes: it is not a reply."""
    return tuple(_read_part(field) for field in _tagged(data, b" reply"))


def _tagged(data: bytes, kind: bytes) -> list[bytes]:
    fields = split(data)
    if fields[:1] != [TAG + kind]:
        raise MalformedBytes(f"it is not a {kind.decode().strip()} of this version of the protocol")
    return fields[1:]


def _read_terms(data: bytes) -> Terms:
    try:
        run, *numbers, settings = data.decode().split(" ")
        terms = Terms(run, *(int(number) for number in numbers), settings=settings)
    except (TypeError, ValueError) as error:
        raise MalformedBytes(f"invalid terms: {error}") from error
    if terms.encode() != data:
        raise MalformedBytes("terms in an invalid encoding")
    return terms


def _read_part(data: bytes) -> Part:
    stage, number, attempt, body = split(data, 4)
    if (
        len(number) != _ROUND_BYTES
        or len(attempt) != ATTEMPT_BYTES
        or int.from_bytes(number, "big") > MOST_ROUND
    ):
        raise MalformedBytes("an invalid round or attempt")
    if len(stage) != 1 or stage[0] not in tuple(Stage):
        raise MalformedBytes("a stage that does not exist")
    return Part(Stage(stage[0]), int.from_bytes(number, "big"), attempt, body)


def digest(*values: bytes) -> bytes:
    """SHA-256 of `join(values)`."""
    return hashlib.sha256(join(*values)).digest()


def round_bytes(number: int) -> bytes:
    """A round's number in 8 bytes."""
    return number.to_bytes(_ROUND_BYTES, "big")


def pack(words: Words, bits: int) -> bytes:
    """The low `bits` bits of each word: first the planes of whole bytes, the lowest first, then
    those of single bits.

    >>> unpack(pack(np.array([1, 2, 131071], dtype=np.uint32), 17), length=3, bits=17).tolist()
    [1, 2, 131071]
    """
    whole = bits - bits % 8
    planes = [(words >> np.uint32(shift)).astype(np.uint8) for shift in range(0, whole, 8)]
    planes += [
        np.packbits((words >> np.uint32(shift) & 1).astype(np.uint8))
        for shift in range(whole, bits)
    ]
    return b"".join(plane.tobytes() for plane in planes)


def unpack(data: bytes, *, length: int, bits: int) -> Words:
    """Inverse of `pack`, modulo 2^bits, shape (length,). MalformedBytes: a wrong number of bytes,
    or bits set after the last value."""
    whole = bits // 8
    single = bits % 8
    row = (length + 7) // 8
    if len(data) != whole * length + single * row:
        raise MalformedBytes(f"{len(data)} bytes instead of {whole * length + single * row}")
    words = np.zeros(length, dtype=np.uint32)
    source = np.frombuffer(data, dtype=np.uint8)
    for place, plane in enumerate(source[: whole * length].reshape(whole, length)):
        words |= plane.astype(np.uint32) << np.uint32(8 * place)
    for place, plane in enumerate(source[whole * length :].reshape(single, row), start=8 * whole):
        values = np.unpackbits(plane)
        if values[length:].any():
            raise MalformedBytes("bits are set after the last value")
        words |= values[:length].astype(np.uint32) << np.uint32(place)
    return words
