"""Bytes of requests and replies: fields that say their length, read strictly, so that one message has one form."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from discreet.masking.agreement import Terms

TAG = b"discreet masking 2"
ATTEMPT_BYTES = 16
MOST_ROUND = 2**63 - 1
_LENGTH_BYTES, _ROUND_BYTES = 8, 8


class MalformedBytes(ValueError):
    """Bytes that nobody who keeps to the protocol writes."""


class Stage(IntEnum):
    """What a node is asked for, in the order in which one attempt asks for it."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    CONFIRM = 4
    UNMASK = 5


@dataclass(frozen=True)
class Part:
    """One stage of one attempt at one round: in a request what is asked, in a reply the answer to it."""

    stage: Stage
    round: int
    attempt: bytes
    body: bytes

    def answered(self, body: bytes) -> Part:
        """The reply to this part."""
        return Part(self.stage, self.round, self.attempt, body)


@dataclass(frozen=True)
class Contents:
    """What a request is about: for the code that carries it."""

    terms: Terms
    stages: tuple[tuple[Stage, int], ...]


def join(*values: bytes) -> bytes:
    """The values one after the other, each behind its length: no two lists give the same bytes."""
    return b"".join(len(value).to_bytes(_LENGTH_BYTES, "big") + value for value in values)


def split(data: bytes, count: int | None = None) -> list[bytes]:
    """What `join` was given.

    Raises:
      MalformedBytes: the lengths do not fit, or there are not `count` values.
    """
    values, place = [], 0
    while place < len(data):
        start = place + _LENGTH_BYTES
        place = start + int.from_bytes(data[place:start], "big")
        if start > len(data) or place > len(data):
            raise MalformedBytes("a field is longer than what holds it")
        values.append(data[start:place])
    if count is not None and len(values) != count:
        raise MalformedBytes(f"{len(values)} fields in place of {count}")
    return values


def join_names(names: Iterable[str]) -> bytes:
    """Names in ascending order."""
    return join(*(name.encode() for name in sorted(names)))


def split_names(data: bytes) -> tuple[str, ...]:
    """What `join_names` was given.

    Raises:
      MalformedBytes: not names, not in ascending order, or one twice.
    """
    return _ascending([_text(value) for value in split(data)])


def join_named(values: Mapping[str, bytes]) -> bytes:
    """Names with a value each, in ascending order."""
    return join(*(each for name in sorted(values) for each in (name.encode(), values[name])))


def split_named(data: bytes) -> dict[str, bytes]:
    """What `join_named` was given.

    Raises:
      MalformedBytes: as `split_names`.
    """
    fields = split(data)
    if len(fields) % 2:
        raise MalformedBytes("a name without a value")
    return dict(zip(_ascending([_text(name) for name in fields[::2]]), fields[1::2], strict=True))


def write_request(terms: Terms, parts: Sequence[Part]) -> bytes:
    """A request to one node: the terms, and one part or two."""
    return join(TAG + b" request", terms.encode(), *(_write_part(part) for part in parts))


def read_request(data: bytes) -> tuple[Terms, tuple[Part, ...]]:
    """What `write_request` was given.

    Raises:
      MalformedBytes: it is no request.
    """
    fields = _tagged(data, b" request")
    if not fields:
        raise MalformedBytes("a request without terms")
    return read_terms(fields[0]), tuple(_read_part(field) for field in fields[1:])


def write_reply(parts: Sequence[Part]) -> bytes:
    """A node's reply: an answer for each part of the request."""
    return join(TAG + b" reply", *(_write_part(part) for part in parts))


def read_reply(data: bytes) -> tuple[Part, ...]:
    """What `write_reply` was given.

    Raises:
      MalformedBytes: it is no reply.
    """
    return tuple(_read_part(field) for field in _tagged(data, b" reply"))


def contents(request: bytes) -> Contents:
    """The terms of a request, and the stages that it asks for with their rounds.

    Raises:
      MalformedBytes: it is no request.
    """
    terms, parts = read_request(request)
    return Contents(terms, tuple((part.stage, part.round) for part in parts))


def read_terms(data: bytes) -> Terms:
    """What `Terms.encode` wrote.

    Raises:
      MalformedBytes: these are no terms, or they are out of their ranges.
    """
    try:
        run, *numbers, settings = _text(data).split(" ")
        terms = Terms(run, *(int(number) for number in numbers), settings=settings)
    except (TypeError, ValueError) as error:
        raise MalformedBytes(f"terms that can't be: {error}") from error
    if terms.encode() != data:
        raise MalformedBytes("terms in another form than the one they have")
    return terms


def digest(*values: bytes) -> bytes:
    """SHA-256 of `join(values)`."""
    return hashlib.sha256(join(*values)).digest()


def round_bytes(number: int) -> bytes:
    """A round's number in 8 bytes."""
    return number.to_bytes(_ROUND_BYTES, "big")


def _write_part(part: Part) -> bytes:
    return join(bytes([part.stage]), round_bytes(part.round), part.attempt, part.body)


def _read_part(data: bytes) -> Part:
    stage, number, attempt, body = split(data, 4)
    if len(number) != _ROUND_BYTES or len(attempt) != ATTEMPT_BYTES or int.from_bytes(number, "big") > MOST_ROUND:
        raise MalformedBytes("a round or an attempt that can't be")
    if len(stage) != 1 or stage[0] not in tuple(Stage):
        raise MalformedBytes("a stage that does not exist")
    return Part(Stage(stage[0]), int.from_bytes(number, "big"), attempt, body)


def _tagged(data: bytes, kind: bytes) -> list[bytes]:
    fields = split(data)
    if fields[:1] != [TAG + kind]:
        raise MalformedBytes(f"it is no {kind.decode().strip()} of this version of the protocol")
    return fields[1:]


def _ascending(names: list[str]) -> tuple[str, ...]:
    if any(first >= second for first, second in itertools.pairwise(names)) or "" in names:
        raise MalformedBytes("names that are not in ascending order, each once")
    return tuple(names)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MalformedBytes("a name that is no text") from error
