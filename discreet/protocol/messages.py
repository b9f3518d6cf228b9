"""Messages between server and client: typed records, and their form as Flower's RecordDict.

A client gets the round, the parameters, the clip norm and the settings of the run that it needs. It
returns the clipped update, one bit, its spending by its own account, and the answer to a query if
the run pays for one. It returns nothing else: no number of examples, no loss. With an answer that
it noises itself a client also reports the size of the noise, which depends on the number of
examples that it holds out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.privacy.private import Private
from discreet.settings.client_settings import ClientSettings
from discreet.settings.rules import (
    ClipNorm,
    ConfigError,
    CountOrZero,
    Rounds,
    message,
    read_json,
    section,
    settings_json,
)

VERSION = 9  # of the train request
REQUEST = "request"
PARAMETERS = "parameters"
REPLY = "reply"
UPDATE = "update"
ANSWER = "answer"
# The start of an array in NumPy's format, as NumPy and others write it. NumPy's own reader gives
# the header to Python's parser, whose errors and use of memory are unbounded.
MAGIC = re.compile(rb"\x93NUMPY(?:\x01\x00(..)|\x02\x00(....))", re.DOTALL)
LONGEST_HEADER = 1024  # bytes
HEADER = re.compile(
    rb"\{ ?'descr': ?'([<>|=]?[A-Za-z?][0-9]{0,3})', ?'fortran_order': ?(True|False), ?"
    rb"'shape': ?\((|[0-9]{1,15},|[0-9]{1,15}(?:, ?[0-9]{1,15}){1,31})\),? ?\} *\n"
)
Floats = NDArray[np.floating[Any]]
Items = dict[str, int | str]
Record = TypeVar("Record")


# in names from outside Discreet: `package.module:function`, `hf:folder`
OUTSIDE = ":"
REFUSED_CODE = 451  # Error.code of a client whose policy or budget forbids the work
EPSILONS = ("epsilon_example", "epsilon_local", "epsilon_local_pure")


class MalformedMessage(ValueError):
    """A message has the wrong contents. Its sender counts as failed; the round continues."""


@section("virtual.")
class VirtualClient:
    """The client that a node acts as; obeyed only in a simulation (`discreet.protocol.simulated`).

    Attributes:
      client_id: its number.
      state_folder: the folder of the virtual clients' ledger.
      ticket: the simulation's ticket in that folder.
      seed: seed of its random numbers; None for secure ones.
      data_path: the path of the simulation's data; None for data that are built in or come from the
        hub.
    """

    client_id: CountOrZero
    state_folder: str
    ticket: str = ""
    seed: int | None = None
    data_path: str | None = None


# Names of queries, which `discreet.queries.query` answers.
EVALUATION = "evaluation"  # of a model, on examples that clients hold out
NORMALISE = "normalise"
STATISTICS = "statistics"
OF_DATA = (NORMALISE, STATISTICS)  # queries before the first round
MASKING = "masking"  # the record of a stage of a masked sum: `discreet.protocol.masked_messages`


@section("work.")
class Assignment:
    """The work that a cohort is asked to do with the parameters.

    Attributes:
      trains: True if the clients train, and send an update with its bit.
      query: the name of a query that they answer too; empty for none.
    """

    trains: bool = True
    query: str = ""


TRAIN = Assignment()
TRAIN_AND_RATE = Assignment(trains=True, query=EVALUATION)
RATE = Assignment(trains=False, query=EVALUATION)


@message
class TrainRequest:
    """The request to a client for one round.

    It has its own version, a whole number. A client reads only its own version, and refuses a
    request with an unknown key, since its guarantees may depend on that setting.

    Attributes:
      round: counted from 1.
      clip_norm: C_t, the L2 norm to which the update is clipped; infinity if user-level privacy is
        off.
      run: the settings of the run, the same in every round.
      work: the work of this round.
      virtual: the client to act as, in a simulation; None in a real federation.
      frozen: the digest of the frozen values in the server's model
        (`discreet.models.models.frozen_digest`); None if the client is in the server's process, and
        builds the same model.
    """

    round: Rounds
    clip_norm: ClipNorm
    run: ClientSettings
    virtual: VirtualClient | None = None
    work: Assignment = TRAIN
    frozen: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class TrainReply(Private):
    """The answer of a client to a request.

    Attributes:
      round: the round of the request.
      update: the clipped change of the parameters, (num_params,), float32, or (0,) if none was
        asked for. Read-only: a decoded one shares the memory of its message.
      below: the bit b, True if the update's norm was at or below the clip norm.
      epsilon_example, epsilon_local, epsilon_local_pure: spent by the client's own account, over
        every round in which it took part; 0 if the guarantee is off. They are not noised:
        docs/privacy.md says what they reveal.
      answer: the query answer, (length,), float32; None without a query. (length + 1,) if the
        client noises it itself, see `discreet.mechanisms.client_noise.OwnNoise`.
      client: the sender, which the server knows; it is not part of the message.
    """

    round: int
    update: Tensor
    below: bool
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0
    answer: Tensor | None = field(default=None, kw_only=True)
    client: int = field(default=-1, kw_only=True)


def request_items(request: TrainRequest) -> Items:
    """The encoded request: its version, and canonical JSON. `NumPyClient.fit` takes the same."""
    return {"version": VERSION, REQUEST: settings_json(request)}


Allowed = Callable[[TrainRequest], None]


def no_outside_name(request: TrainRequest) -> None:
    """Raises MalformedMessage if a request names code or a folder from outside Discreet."""
    model = request.run.model.name
    mechanism = request.run.user.mechanism
    if OUTSIDE in model or mechanism is not None:
        raise MalformedMessage(
            "the train request names code or a folder, and this reader allows none"
        )


def request_of(items: Mapping[str, object], *, allowed: Allowed = no_outside_name) -> TrainRequest:
    """Reads what `request_items` wrote.

    Args:
      allowed: raises if the node's owner does not allow the code and the folders that the request
        names. Only this function makes a request from a message, so `allowed` is always called
        before a name is resolved.

    Raises:
      MalformedMessage: another version, a missing or unknown key, a value of the wrong type or out
        of range.
    """
    version = items.get("version")
    if version != VERSION:
        raise MalformedMessage(
            f"the train request has version {version}, this client reads version {VERSION}: "
            "server and client need the same release of Discreet"
        )
    if unknown := items.keys() - {"version", REQUEST}:
        raise MalformedMessage(
            f"the train request holds {', '.join(sorted(unknown))}, which this client does not know"
        )
    request = read_canonical(TrainRequest, items.get(REQUEST), "the train request")
    allowed(request)
    return request


def read_canonical(kind: type[Record], text: object, what: str) -> Record:
    """The record of a text that `settings_json` wrote. In any other text a key could be missing or
    duplicated.

    Raises:
      MalformedMessage: the text is not canonical, or the record has a wrong value.
    """
    if not isinstance(text, str):
        raise MalformedMessage(f"{what} is no text")
    try:
        record = read_json(kind, text)
    except ConfigError as error:
        raise MalformedMessage(f"{what} can't be followed: {error}") from error
    if settings_json(record) != text:
        raise MalformedMessage(
            f"{what} must hold every setting once, as this release of Discreet writes it"
        )
    return record


def read_content(content: RecordDict) -> tuple[ConfigRecord, Floats]:
    """Reads a message to a client: the undecoded record of the request, and the parameters,
    (num_params,).

    Raises:
      MalformedMessage: a part is missing or of the wrong kind.
    """
    # content.config_records and the like would create a reference cycle, which keeps the message's
    # arrays in memory for long.
    record = content.get(REQUEST)
    arrays = content.get(PARAMETERS)
    if (
        not isinstance(record, ConfigRecord)
        or not isinstance(arrays, ArrayRecord)
        or PARAMETERS not in arrays
    ):
        raise MalformedMessage("the message holds no train request and parameters of Discreet")
    params = floats_of(arrays[PARAMETERS], PARAMETERS)
    if params.ndim != 1:
        raise MalformedMessage(f"the {PARAMETERS} must have the shape (n,), got {params.shape}")
    return record, params


def decode_request(
    content: RecordDict, *, allowed: Allowed = no_outside_name
) -> tuple[TrainRequest, Tensor]:
    """The decoded request and the parameters as float32. `allowed` as for `request_of`.

    Raises:
      MalformedMessage: as `read_content` and `request_of`.
    """
    record, params = read_content(content)
    return request_of(record, allowed=allowed), torch.from_numpy(np.array(params, dtype=np.float32))


def reply_numbers(reply: TrainReply) -> dict[str, int | float]:
    """The numbers of a reply beside the update."""
    spent = {name: getattr(reply, name) for name in EPSILONS}
    return {"round": reply.round, "below": int(reply.below), **spent}


def encode_arrays(arrays: Sequence[Floats], numbers: Mapping[str, int | float]) -> RecordDict:
    """The content of a reply: the update, the answer if there is one, and the numbers."""
    named = zip((UPDATE, ANSWER), arrays, strict=False)
    content = {
        name: ArrayRecord({name: array_of(torch.from_numpy(values))}) for name, values in named
    }
    return RecordDict({**content, REPLY: MetricRecord(dict(numbers))})


def array_of(vector: Tensor) -> Array:
    """A vector (n,) as float32."""
    return Array(vector.detach().cpu().numpy().astype(np.float32, copy=False))


def floats_of(array: Array, name: str) -> Floats:
    """An array of any shape and any float dtype. Its header is checked before memory is allocated.
    Read-only: it shares the memory of the message."""
    shape, by_columns, dtype, start = header_of(array, name)
    if dtype not in (np.float16, np.float32, np.float64):
        raise MalformedMessage(f"the array {name} must be floats, got {dtype} of {shape}")
    try:
        values: Floats = np.frombuffer(array.data, dtype=dtype, offset=start)
        if len(values) != math.prod(shape):
            raise MalformedMessage(
                f"the array {name} announces {math.prod(shape)} values and holds {len(values)}"
            )
        return values.reshape(shape, order="F" if by_columns else "C")
    except ValueError as error:
        raise MalformedMessage(f"the array {name} can't be decoded: {error}") from error


def header_of(array: Array, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads the header of an array in NumPy's format with a separate parser, and trusts nothing
    else that the message says about the array.

    The result is the shape, True for column-major order, the dtype, and the offset of the
    values."""
    magic = MAGIC.match(array.data)
    if magic is None:
        raise MalformedMessage(
            f"the array {name} can't be decoded: it does not begin as NumPy's arrays do"
        )
    start = magic.end() + int.from_bytes(magic[1] or magic[2], "little")
    if start - magic.end() > LONGEST_HEADER:
        raise MalformedMessage(
            f"the array {name} can't be decoded: its header is longer than {LONGEST_HEADER} bytes"
        )
    header = HEADER.fullmatch(array.data, magic.end(), start)
    if header is None:
        raise MalformedMessage(
            f"the array {name} can't be decoded: its header is not one that NumPy writes"
        )
    try:
        dtype = np.dtype(header[1].decode())
    except TypeError as error:
        raise MalformedMessage(f"the array {name} can't be decoded: {error}") from error
    shape = tuple(int(length) for length in header[3].split(b",") if length)
    return shape, header[2] == b"True", dtype, start


def all_finite(values: NDArray[np.float32]) -> bool:
    """True if all values (n,) are finite. A finite sum of squares proves it quickly."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())
