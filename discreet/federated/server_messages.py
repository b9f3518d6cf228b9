"""The messages as the server writes and reads them: it asks, and checks what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.client_settings import ClientSettings
from discreet.federated.messages import (
    EPSILONS,
    PARAMETERS,
    REPLY,
    REQUEST,
    UPDATE,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
    array_of,
    floats_of,
    request_items,
)

PIECE = 2**16


@dataclass(frozen=True)
class OwnMessages:
    """The messages to clients of Discreet. `run` is what the run asks of them, the same in every round."""

    run: ClientSettings

    def of_round(self, number: int, params: Tensor, clip_norm: float) -> OwnRound:
        """The messages of one round; the parameters are encoded once."""
        return OwnRound(number, parameters_record(params), self.run, clip_norm, params.numel())


@dataclass(frozen=True, eq=False)
class OwnRound:
    """The messages of one round to clients of Discreet."""

    number: int
    parameters: ArrayRecord
    run: ClientSettings
    clip_norm: float
    num_params: int

    @property
    def reply_size(self) -> int:
        """How many values a reply holds."""
        return self.num_params

    def request(self, client: VirtualClient | None) -> RecordDict:
        """What a client is sent; in a simulation with which client to be."""
        return encode_request(TrainRequest(self.number, self.clip_norm, self.run, client), self.parameters)

    def reply(self, content: RecordDict) -> TrainReply:
        """See `decode_reply`."""
        return decode_reply(content, round_number=self.number, num_params=self.num_params)


def parameters_record(params: Tensor) -> ArrayRecord:
    """Parameters (num_params,) as one array: one piece to encode, whatever the model."""
    return ArrayRecord({PARAMETERS: array_of(params)})


def encode_request(request: TrainRequest, parameters: ArrayRecord) -> RecordDict:
    """The content of a training message. `parameters` is shared by all messages of a round."""
    return RecordDict({PARAMETERS: parameters, REQUEST: ConfigRecord(dict(request_items(request)))})


def decode_reply(content: RecordDict, *, round_number: int, num_params: int) -> TrainReply:
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
    update = floats_of(arrays[UPDATE], UPDATE)
    if update.shape != (num_params,):
        raise MalformedMessage(f"the update must have the shape ({num_params},), got {update.shape}")
    with np.errstate(over="ignore"):
        vector = np.require(update, np.float32, ("C", "ALIGNED"))
    if not all_finite(vector):
        raise MalformedMessage("the update holds NaN, infinity, or values beyond float32")
    spent = [_epsilon(numbers.get(name), name) for name in EPSILONS]
    return TrainReply(round_number, _tensor(vector), bool(below), *spent)


def all_finite(values: NDArray[np.float32]) -> bool:
    """Whether all values (n,) are finite. A finite sum of squares says so, quicker than a look at each value; if it
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


def _epsilon(value: object, name: str) -> float:
    if not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise MalformedMessage(f"{name} must be a number of at least 0 (got {value})")
    return float(value)
