"""The arrays of another Flower app as one vector of parameters, and back; and the messages that
hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.flower.round_messages import RoundMessages
from discreet.privacy.clipping import row_norms
from discreet.protocol import messages
from discreet.protocol.masked_messages import ASKED, FROZEN
from discreet.protocol.messages import MalformedMessage, TrainReply, TrainRequest
from discreet.settings.rules import ConfigError

STATISTICS = ("running_mean", "running_var")
FLOATS = ("float16", "float32", "float64")
KEPT = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), *FLOATS)
HALF = float(np.finfo("float16").max)
WRAPPED = (
    "each array has the prefix {} before its name: send the state_dict of the model that "
    "the wrapper holds"
)
UNWRAPPED = (
    "each array lacks the prefix {} that its name has in initial_arrays: make them of the "
    "model without wrapper"
)
ROUND = "server-round"  # the key of Flower's own strategies

Values = NDArray[Any]
TrainConfig = ConfigRecord | Callable[[int], ConfigRecord]


@dataclass(frozen=True)
class ArrayPart:
    """One array. `learned`: True if it is part of the vector of parameters; otherwise it keeps the
    server's value."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    learned: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class ArrayLayout:
    """An app's arrays in order, and the values of those that are not learned.

    Attributes:
      parts: every array; the learned ones, concatenated, are the vector of parameters.
      kept: the values of the others by name: whole numbers, and arrays that were declared frozen.
        They are sent unchanged, and their values in replies are not read.
    """

    parts: tuple[ArrayPart, ...]
    kept: Mapping[str, Values]

    @property
    def num_params(self) -> int:
        """The length of the vector of parameters."""
        return sum(part.size for part in self.parts if part.learned)

    def vector(self, arrays: ArrayRecord) -> Tensor:
        """The learned arrays of a record as one vector (num_params,), float32: see `difference`."""
        return self.difference(arrays, np.zeros(self.num_params, np.float32))

    def difference(self, arrays: ArrayRecord, sent: NDArray[np.float32]) -> Tensor:
        """The learned arrays of a record as one vector (num_params,), float32, minus what was
        `sent`. Raises MalformedMessage: the record does not fit the layout, or holds a value that
        is not finite in float32."""
        named = self._named(arrays)
        found = np.empty(self.num_params, np.float32)
        start = 0
        for part in self.parts:
            # The shape is read from the array itself, as Flower's NumPyClient does not state it.
            shape = messages.header_of(named[part.name], part.name)[0]
            if shape != part.shape:
                raise MalformedMessage(
                    f"the array {part.name} must have the shape {part.shape}, got {shape}"
                )
            if part.learned:
                where = slice(start, start := start + part.size)
                values = messages.floats_of(named[part.name], part.name).reshape(-1)
                with np.errstate(over="ignore", invalid="ignore"):
                    # A wider reply is subtracted in its own precision; values beyond float32 become
                    # infinite.
                    np.subtract(values, sent[where], out=found[where], casting="same_kind")
        if not messages.all_finite(found):
            raise MalformedMessage("an array holds NaN, infinity, or values beyond float32")
        return torch.from_numpy(found)

    def _named(self, arrays: ArrayRecord) -> Mapping[str, Array]:
        """The arrays by name. A NumPyClient gives no names, but numbers its arrays in the order in
        which it got them."""
        wanted = [part.name for part in self.parts]
        if set(wanted) == set(arrays):
            return arrays
        numbers = [str(number) for number in range(len(wanted))]
        if set(arrays) != set(numbers):
            raise MalformedMessage(differing_names(wanted, list(arrays)))
        return {name: arrays[number] for name, number in zip(wanted, numbers, strict=True)}

    def record(self, params: Tensor) -> ArrayRecord:
        """The arrays with these parameters (num_params,), each in its own dtype and clamped to its
        range, so that all values are finite."""
        vector = params.detach().cpu().numpy()
        start = 0
        found = dict(self.kept)
        for part in self.parts:
            if part.learned:
                values = vector[start : start + part.size].reshape(part.shape)
                start += part.size
                if part.dtype == "float16":
                    values = np.clip(values, -HALF, HALF)
                found[part.name] = values.astype(part.dtype)
        return ArrayRecord({part.name: Array(found[part.name]) for part in self.parts})

    def described(self) -> str:
        """Names, shapes, dtypes and learned flags as JSON. One run can resume another only if these
        are the same."""
        return json.dumps([asdict(part) for part in self.parts])


def differing_names(wanted: Sequence[str], found: Sequence[str]) -> str:
    """The difference between the wanted and the found names of arrays, in words.

    >>> words = differing_names(["weight", "bias"], ["_module.weight", "_module.bias"])
    >>> words.startswith("each array has the prefix '_module.' before its name")
    True
    >>> differing_names(["weight", "bias"], ["weight", "scale", "shift"])
    "3 arrays in place of 2; missing: 'bias'; not asked for: 'scale' and 1 more"
    """
    for longer, shorter, what in ((found, wanted, WRAPPED), (wanted, found, UNWRAPPED)):
        prefix = min(longer, default="").removesuffix(min(shorter, default=""))
        if prefix and {prefix + name for name in shorter} == set(longer):
            return what.format(repr(prefix))
    said = f"{len(found)} arrays in place of {len(wanted)}"
    missing = sorted({*wanted}.difference(found))
    more = sorted({*found}.difference(wanted))
    for what, names in (("missing", missing), ("not asked for", more)):
        if names:
            said += f"; {what}: {names[0]!r}"
            if names[1:]:
                said += f" and {len(names) - 1} more"
    return said


def layout_of(arrays: ArrayRecord, *, frozen: Sequence[str] = ()) -> ArrayLayout:
    """The layout of the arrays with which a run starts. Floats are learned unless their name
    matches a pattern of `frozen`, in the syntax of fnmatch. Raises ConfigError: nothing is left to
    learn, a pattern matches no name, a dtype is not supported, or a layer such as BatchNorm keeps
    running statistics that are not frozen."""
    values = {name: _initial(name, array) for name, array in arrays.items()}
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in values):
            raise ConfigError(f"frozen={pattern} fits no array; there are {', '.join(values)}")
    parts = []
    for name, found in values.items():
        fixed = any(fnmatchcase(name, pattern) for pattern in frozen)
        layer, _, what = name.rpartition(".")
        learned = str(found.dtype) in FLOATS and not fixed
        # Noise would soon make a variance negative; and such a layer mixes examples.
        if learned and what in STATISTICS:
            raise ConfigError(
                f"initial_arrays: {layer or name} keeps running statistics ({name}), which noise "
                f"would spoil: take "
                'GroupNorm, by discreet.to_group_norm(model), or frozen=("*running_mean", '
                '"*running_var")'
            )
        parts.append(ArrayPart(name, found.shape, str(found.dtype), learned))
    if not any(part.learned and part.size for part in parts):
        raise ConfigError(
            "initial_arrays must hold floats that are not frozen: nothing would be learned (trees "
            "are bytes)"
        )
    return ArrayLayout(
        tuple(parts), {part.name: values[part.name] for part in parts if not part.learned}
    )


def _initial(name: str, array: Array) -> Values:
    try:
        values = np.asarray(array.numpy(), order="C")  # the order in files
    except (TypeError, ValueError) as error:
        raise ConfigError(f"initial_arrays: {name} can't be read: {error}") from error
    if str(values.dtype) not in KEPT:
        raise ConfigError(
            f"initial_arrays: {name} must be of one of {', '.join(KEPT)} (got {values.dtype})"
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32)).all()
    if str(values.dtype) in FLOATS and not finite:
        raise ConfigError(f"initial_arrays: {name} holds NaN, infinity, or values beyond float32")
    return values


@dataclass(frozen=True, eq=False)
class FlowerMessages:
    """Messages to the clients of a Flower app, as `flwr.serverapp.strategy.FedAvg` sends them.

    Attributes:
      config: sent in every round, or a function from the number of a round to it.
      keys: keys of the two records, with the arrays and with the config.
      metric: the name of the accuracy among clients' metrics, for federated evaluation.
      masked: under secure aggregation the patterns of frozen arrays.
    """

    layout: ArrayLayout
    config: TrainConfig
    keys: tuple[str, str] = ("arrays", "config")
    metric: str = "accuracy"
    masked: tuple[str, ...] | None = None

    def __call__(self, asked: TrainRequest, params: Tensor) -> RoundMessages:
        """The messages of one round: train messages, or Flower's evaluate messages for federated
        evaluation."""
        number = asked.round
        trains = asked.work.trains
        arrays = self.layout.record(params)
        # The values as sent, not `params`: an array of float16 has less precision.
        sent = self.layout.vector(arrays)
        if isinstance(self.config, ConfigRecord):
            given = self.config
        else:
            given = self.config(number)
        if not isinstance(given, ConfigRecord):
            raise ConfigError(
                f"train_config must give a ConfigRecord for each round (got {given!r} for {number})"
            )
        # A NumPyClient reads the records of training and of evaluation by different names.
        keys = [key if trains else key.replace("fitins.", "evaluateins.") for key in self.keys]
        content = RecordDict(
            dict(zip(keys, (arrays, ConfigRecord({**given, ROUND: number})), strict=True))
        )
        if self.masked is not None:
            content[ASKED] = ConfigRecord(
                {**messages.request_items(asked), FROZEN: list(self.masked)}
            )
        if not trains:
            return RoundMessages(
                MessageType.EVALUATE, 1, lambda _: content, partial(self._rating, number)
            )
        size = sum(part.size for part in self.layout.parts)  # including arrays that are not learned
        return RoundMessages(
            MessageType.TRAIN, size, lambda _: content, partial(self._update, asked, sent)
        )

    def _update(self, asked: TrainRequest, sent: Tensor, content: RecordDict) -> TrainReply:
        """The difference between the returned and the sent arrays, and its bit. Nothing else of a
        reply is read."""
        update = self.layout.difference(only_arrays(content, "the reply"), sent.numpy())
        # The bit is taken from the norm before any clipping.
        return TrainReply(
            asked.round, update, float(row_norms(update.unsqueeze(0))[0]) <= asked.clip_norm
        )

    def _rating(self, number: int, content: RecordDict) -> TrainReply:
        """The answer of a client with this accuracy."""
        value = next(
            (record[self.metric] for record in content.values() if self.metric in record), None
        )
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            records = [record for record in content.values() if isinstance(record, MetricRecord)]
            names = sorted({name for record in records for name in record})
            if value is not None:
                there = f"{value!r}"
            else:
                there = f"none; there are {', '.join(names) or 'no metrics'}"
            raise MalformedMessage(
                f"the metric {self.metric} must be a number from 0 to 1 (got {there})"
            )
        return TrainReply(
            number, torch.zeros(0), False, answer=torch.tensor([2 * float(value) - 1])
        )


def only_arrays(content: RecordDict, what: str) -> ArrayRecord:
    """The only record of arrays in a content. Raises MalformedMessage: there is none, or more than
    one."""
    records = [record for record in content.values() if isinstance(record, ArrayRecord)]
    if len(records) != 1:
        names = ", ".join(
            repr(name) for name, record in content.items() if isinstance(record, ArrayRecord)
        )
        raise MalformedMessage(
            f"{what} must hold one record of arrays (got {len(records)}: {names or 'none'})"
        )
    return records[0]
