"""What travels between server and client: typed records, and their form as Flower's RecordDict.

To a client go the round, the parameters, the clip norm and the settings. Back come the clipped update, one bit, and
what the client has spent by its own account. Nothing else: no number of examples, no loss, no accuracy.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.constant import SType
from numpy.typing import NDArray
from torch import Tensor

ORDER, PARAMETERS, REPLY, UPDATE = "order", "parameters", "reply", "update"
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
Floats = NDArray[np.floating[Any]]
PIECE = 2**16
REFUSED_CODE = 451  # Error.code of a client whose policy or budget forbids the work
EPSILONS = ("epsilon_example", "epsilon_local", "epsilon_local_pure")


class MalformedMessage(ValueError):
    """A message does not hold what it should. The sender is counted as failed; the round goes on."""


@dataclass(frozen=True)
class Order:
    """What a client is asked to do in one round.

    Attributes:
      round: counted from 1.
      clip_norm: C_t, the L2 norm to clip the update to; infinity where user-level privacy is off.
      settings: the RunConfig as JSON (`config.config_to_json`).
      client_id: which virtual client to be, in a simulation; None in a real federation, where a node is itself.
      state_folder: where virtual clients keep their ledger, in a simulation; None in a real federation.
    """

    round: int
    clip_norm: float
    settings: str
    client_id: int | None = None
    state_folder: str | None = None


@dataclass(frozen=True, eq=False)
class Reply:
    """What a client sends back.

    Attributes:
      round: the round that was asked for.
      update: the clipped change of the parameters, (num_params,), float32. Not to be written to: one that was decoded
        lies in the memory of its message.
      below: the bit b, whether the update's norm was at or below the clip norm.
      epsilon_example, epsilon_local, epsilon_local_pure: spent by the client's own account, over every round it took
        part in; 0 where the guarantee is off. They are not noised: docs/privacy.md says what they give away.
      client: who sent it, which the server knows by itself; it does not travel.
    """

    round: int
    update: Tensor
    below: bool
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0
    client: int = field(default=-1, kw_only=True)


def order_config(order: Order) -> dict[str, bool | bytes | float | int | str]:
    """The order as the flat dictionary that `NumPyClient.fit` takes."""
    config: dict[str, bool | bytes | float | int | str] = {
        "round": order.round,
        "clip_norm": order.clip_norm,
        "settings": order.settings,
    }
    if order.client_id is not None:
        config["client_id"] = order.client_id
    if order.state_folder is not None:
        config["state_folder"] = order.state_folder
    return config


def order_from_config(config: dict[str, bool | bytes | float | int | str]) -> Order:
    """Reads what `order_config` wrote.

    Raises:
      MalformedMessage: a field is missing or of the wrong type.
    """
    number, clip_norm, settings = config.get("round"), config.get("clip_norm"), config.get("settings")
    client_id, state_folder = config.get("client_id"), config.get("state_folder")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MalformedMessage(f"the order's round must be a whole number of at least 1 (got {number!r})")
    if not isinstance(clip_norm, float) or math.isnan(clip_norm) or clip_norm <= 0:
        raise MalformedMessage(f"the order's clip_norm must be above 0 (got {clip_norm!r})")
    if not isinstance(settings, str):
        raise MalformedMessage("the order has no settings")
    if client_id is not None and (not isinstance(client_id, int) or isinstance(client_id, bool) or client_id < 0):
        raise MalformedMessage(f"the order's client_id must be a whole number of at least 0 (got {client_id!r})")
    if state_folder is not None and not isinstance(state_folder, str):
        raise MalformedMessage("the order's state_folder must be a path")
    return Order(number, clip_norm, settings, client_id, state_folder)


def parameters_record(params: Tensor) -> ArrayRecord:
    """Parameters (num_params,) as one array: one piece to encode, whatever the model."""
    return ArrayRecord({PARAMETERS: _array(params)})


def encode_order(order: Order, parameters: ArrayRecord) -> RecordDict:
    """The content of a training message. `parameters` is shared by all messages of a round."""
    return RecordDict({PARAMETERS: parameters, ORDER: ConfigRecord(dict(order_config(order)))})


def decode_order(content: RecordDict) -> tuple[Order, list[Floats]]:
    """What a client was sent: the order, and the parameters as a list of one array, as `NumPyClient.fit` takes them.

    Raises:
      MalformedMessage: a part is missing or of the wrong kind.
    """
    # Not content.config_records and its like: they would tie the message into a cycle, and keep its arrays for long.
    record, arrays = content.get(ORDER), content.get(PARAMETERS)
    if not isinstance(record, ConfigRecord) or not isinstance(arrays, ArrayRecord) or PARAMETERS not in arrays:
        raise MalformedMessage("the message holds no order and parameters of Discreet")
    config = {name: value for name, value in record.items() if isinstance(value, bool | bytes | float | int | str)}
    return order_from_config(config), [_floats(arrays[PARAMETERS], PARAMETERS)]


def encode_reply(reply: Reply) -> RecordDict:
    """The content of a reply."""
    numbers = {
        "round": reply.round,
        "below": int(reply.below),
        "epsilon_example": reply.epsilon_example,
        "epsilon_local": reply.epsilon_local,
        "epsilon_local_pure": reply.epsilon_local_pure,
    }
    return RecordDict({UPDATE: ArrayRecord({UPDATE: _array(reply.update)}), REPLY: MetricRecord(dict(numbers))})


def reply_from_numbers(arrays: list[Floats], numbers: dict[str, bool | bytes | float | int | str]) -> Reply:
    """What `DPClient.fit` returned, as a typed reply."""
    spent = [float(numbers[name]) for name in EPSILONS]
    return Reply(int(numbers["round"]), torch.from_numpy(arrays[0]), bool(numbers["below"]), *spent)


def decode_reply(content: RecordDict, *, round_number: int, num_params: int) -> Reply:
    """A client's reply, checked before anything is computed from it.

    Raises:
      MalformedMessage: another round, a missing or further part, a wrong shape or dtype, a value that is not finite, a
        bit that is not a bit, an epsilon that is not a number of at least 0. A client that sends such a reply counts
        as zero, and neither noise nor denominator change.
    """
    numbers, arrays = content.get(REPLY), content.get(UPDATE)
    if not isinstance(numbers, MetricRecord) or not isinstance(arrays, ArrayRecord) or list(arrays) != [UPDATE]:
        raise MalformedMessage("the reply does not hold exactly one update and its numbers")
    if numbers.get("round") != round_number:
        raise MalformedMessage(f"the reply is for round {numbers.get('round')}, not {round_number}")
    below = numbers.get("below")
    if not isinstance(below, int) or below not in (0, 1):
        raise MalformedMessage(f"the bit must be 0 or 1 (got {below})")
    update = _floats(arrays[UPDATE], UPDATE)
    if update.shape != (num_params,):
        raise MalformedMessage(f"the update must have the shape ({num_params},), got {update.shape}")
    with np.errstate(over="ignore"):
        vector = np.require(update, np.float32, ("C", "ALIGNED"))
    if not _all_finite(vector):
        raise MalformedMessage("the update holds NaN, infinity, or values beyond float32")
    spent = [_epsilon(numbers.get(name), name) for name in EPSILONS]
    return Reply(round_number, _tensor(vector), bool(below), *spent)


def _array(vector: Tensor) -> Array:
    """A vector (n,) as float32, byte for byte what `Array` makes of it, in one copy where that takes three."""
    values = np.ascontiguousarray(vector.detach().cpu().numpy(), dtype=np.float32)
    return Array(str(values.dtype), values.shape, SType.NUMPY, b"".join((_header(len(values)), values.data)))


@lru_cache(maxsize=16)
def _header(count: int) -> bytes:
    """What stands before `count` float32 values in NumPy's format."""
    header = io.BytesIO()
    kind = np.lib.format.dtype_to_descr(np.dtype(np.float32))
    np.lib.format.write_array_header_1_0(header, {"descr": kind, "fortran_order": False, "shape": (count,)})
    return header.getvalue()


def _all_finite(values: NDArray[np.float32]) -> bool:
    """Whether all values (n,) are finite. A finite sum of squares says so, quicker than a look at each value; where it
    is not, each is looked at, by pieces, so that nothing of their size is made on the way.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(np.dot(values, values)):
            return True
    return all(np.isfinite(values[start : start + PIECE]).all() for start in range(0, len(values), PIECE))


class _Memory:
    """The memory of an array, of which it does not say that it can't be written to."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values  # keeps the memory
        self.__array_interface__ = values.__array_interface__ | {"data": (values.ctypes.data, False)}


def _tensor(values: NDArray[np.float32]) -> Tensor:
    """A tensor in the same memory. PyTorch has none that can't be written to, and warns: whoever has one must not."""
    return torch.from_numpy(np.asarray(_Memory(values)))


def _floats(array: Array, name: str) -> Floats:
    """An array (n,) of any float dtype. The header is checked before memory is taken for what it announces."""
    file = io.BytesIO(array.data)
    try:
        read_header = HEADERS[np.lib.format.read_magic(file)]
        shape, _, dtype = read_header(file)
        if len(shape) != 1 or dtype not in (np.float16, np.float32, np.float64):
            raise MalformedMessage(f"the array {name} must be floats of shape (n,), got {dtype} of {shape}")
        values: Floats = np.frombuffer(array.data, dtype=dtype, offset=file.tell())
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError) as error:
        if isinstance(error, MalformedMessage):
            raise
        raise MalformedMessage(f"the array {name} can't be decoded: {error}") from error
    if values.shape != shape:
        raise MalformedMessage(f"the array {name} announces {shape[0]} values and holds {len(values)}")
    return values


def _epsilon(value: object, name: str) -> float:
    if not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise MalformedMessage(f"{name} must be a number of at least 0 (got {value})")
    return float(value)
