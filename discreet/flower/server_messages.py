"""The messages as the server writes and reads them: it asks, and checks what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.flower.grid_transport import RoundMessages
from discreet.protocol.masked_messages import MASKING, MASKING_REPLY, NAME, PEERS, Member
from discreet.protocol.messages import (
    ANSWER,
    EPSILONS,
    PARAMETERS,
    REPLY,
    REQUEST,
    TRAIN,
    UPDATE,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    Work,
    array_of,
    floats_of,
    request_items,
)
from discreet.settings.client_settings import ClientSettings


@dataclass(frozen=True)
class OwnMessages:
    """The messages to clients of Discreet. `lengths`: of the answer to a query, by its name; `frozen`: the digest of
    the model's frozen values."""

    run: ClientSettings
    lengths: Mapping[str, int] = field(default_factory=dict)
    frozen: str | None = None

    def of_round(self, number: int, params: Tensor, clip_norm: float, work: Work = TRAIN) -> RoundMessages:
        """The messages of one round; the parameters are encoded once."""
        asked = TrainRequest(number, clip_norm, self.run, work=work, frozen=self.frozen)
        parameters = parameters_record(params)
        num_params, answer_size = params.numel() if work.trains else 0, self.lengths[work.query] if work.query else 0
        return RoundMessages(
            MessageType.TRAIN,
            max(1, num_params + answer_size),
            request=lambda client: encode_request(replace(asked, virtual=client), parameters),
            reply=partial(decode_reply, round_number=number, num_params=num_params, answer_size=answer_size),
        )


def parameters_record(params: Tensor) -> ArrayRecord:
    """Parameters (num_params,) as one array: one piece to encode, whatever the model."""
    return ArrayRecord({PARAMETERS: array_of(params)})


def encode_request(request: TrainRequest, parameters: ArrayRecord) -> RecordDict:
    """The content of a training message. `parameters` is shared by all messages of a round."""
    return RecordDict({PARAMETERS: parameters, REQUEST: ConfigRecord(dict(request_items(request)))})


def decode_reply(content: RecordDict, *, round_number: int, num_params: int, answer_size: int = 0) -> TrainReply:
    """A client's reply, checked before anything is computed from it. `answer_size`: of its answer, 0 for none. Raises
    MalformedMessage: another round, a missing or further part, a wrong shape or dtype, a value that is not finite, a
    bit that is not a bit, an epsilon that is not a number of at least 0. A client that sends such a reply counts as
    zero, and neither noise nor denominator change."""
    numbers, arrays = content.get(REPLY), content.get(UPDATE)
    if not isinstance(numbers, MetricRecord) or not isinstance(arrays, ArrayRecord) or list(arrays) != [UPDATE]:
        raise MalformedMessage("the reply does not hold exactly one update and its numbers")
    if numbers.get("round") != round_number:
        raise MalformedMessage(f"the reply is for round {numbers.get('round')}, not {round_number}")
    below = numbers.get("below")
    if not isinstance(below, int) or below not in (0, 1):
        raise MalformedMessage(f"the bit must be 0 or 1 (got {below})")
    update, answer = _vector(arrays, UPDATE, num_params), None
    if answer_size:
        answered = content.get(ANSWER)
        if not isinstance(answered, ArrayRecord) or list(answered) != [ANSWER]:
            raise MalformedMessage("the reply does not hold the answer to what was asked")
        answer = _vector(answered, ANSWER, answer_size)
    spent = [_epsilon(numbers.get(name), name) for name in EPSILONS]
    return TrainReply(round_number, update, bool(below), *spent, answer=answer)


def _vector(arrays: ArrayRecord, name: str, size: int) -> Tensor:
    values = floats_of(arrays[name], name)
    if values.shape != (size,):
        raise MalformedMessage(f"the {name} must have the shape ({size},), got {values.shape}")
    with np.errstate(over="ignore"):
        vector = values.astype(np.float32)  # a copy: the memory of a message can't be written to
    if not all_finite(vector):
        raise MalformedMessage(f"the {name} holds NaN, infinity, or values beyond float32")
    return torch.from_numpy(vector)


def read_masking_reply(content: RecordDict) -> bytes:
    """A node's answer to a masking request, or MalformedMessage: what `masked_messages.reply_content` wrote."""
    record = content.get(MASKING)
    reply = record.get(MASKING_REPLY) if isinstance(record, ConfigRecord) and len(record) == 1 else None
    if len(content) != 1 or not isinstance(reply, bytes):
        raise MalformedMessage("the reply does not hold the answer to a masking request")
    return reply


def read_member(content: RecordDict) -> Member:
    """The node that answers and its peers, as `masked_messages.member_content` wrote them, or MalformedMessage."""
    record = content.get(MASKING)
    name, peers = (record.get(NAME), record.get(PEERS)) if isinstance(record, ConfigRecord) else (None, None)
    if not isinstance(name, str) or not isinstance(peers, list) or not all(isinstance(each, str) for each in peers):
        raise MalformedMessage("the reply does not say which node it is, and among whom")
    member = Member(name, tuple(str(each) for each in peers))
    if name not in member.peers or len(set(member.peers)) != len(member.peers):
        raise MalformedMessage("the node's list of peers does not hold itself, or a name twice")
    return member


def all_finite(values: NDArray[np.float32]) -> bool:
    """True if all values (n,) are finite. A finite sum of squares proves it quickly."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())


def _epsilon(value: object, name: str) -> float:
    if not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise MalformedMessage(f"{name} must be a number of at least 0 (got {value})")
    return float(value)
