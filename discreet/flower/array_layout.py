"""The arrays of somebody else's Flower app as one vector of parameters, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from discreet.flower.server_messages import all_finite
from discreet.protocol.messages import MalformedMessage, header_of, shaped_floats_of
from discreet.settings.rules import ConfigError

STATISTICS = ("running_mean", "running_var")
FLOATS = ("float16", "float32", "float64")
KEPT = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), *FLOATS)

HALF = float(np.finfo("float16").max)

Values = NDArray[Any]


@dataclass(frozen=True)
class ArrayPart:
    """One array. `learned`: it is part of the vector of parameters; otherwise the server's value stays."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    learned: bool

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class ArrayLayout:
    """An app's arrays in order, and the values of those that are not learned.

    Attributes:
      parts: every array; those that are learned, one after the other, are the vector of parameters.
      kept: the values of the others by name: whole numbers, and what was declared frozen. They are sent as they are,
        and what a client makes of them is not read.
    """

    parts: tuple[ArrayPart, ...]
    kept: Mapping[str, Values]

    @property
    def num_params(self) -> int:
        """The length of the vector of parameters."""
        return sum(part.size for part in self.parts if part.learned)

    @property
    def num_values(self) -> int:
        """The number of values in a reply, with those that are not learned."""
        return sum(part.size for part in self.parts)

    def vector(self, arrays: ArrayRecord) -> Tensor:
        """The learned arrays of a record as one vector (num_params,), float32: see `difference`."""
        return self.difference(arrays, np.zeros(self.num_params, np.float32))

    def difference(self, arrays: ArrayRecord, sent: NDArray[np.float32]) -> Tensor:
        """The learned arrays of a record as one vector (num_params,), float32, minus what was `sent`.

        Raises:
          MalformedMessage: the record does not fit the layout, or holds a value that is not finite in float32.
        """
        named = self._named(arrays)
        found, start = np.empty(self.num_params, np.float32), 0
        for part in self.parts:
            # What counts is what the array holds: Flower's NumPyClient says nothing of shapes beside it.
            shape = header_of(named[part.name], part.name)[0]
            if shape != part.shape:
                raise MalformedMessage(f"the array {part.name} must have the shape {part.shape}, got {shape}")
            if part.learned:
                where = slice(start, start := start + part.size)
                values = shaped_floats_of(named[part.name], part.name).reshape(-1)
                with np.errstate(over="ignore", invalid="ignore"):
                    # A wider reply is compared in its own precision; what is beyond float32 becomes infinite.
                    np.subtract(values, sent[where], out=found[where], casting="same_kind")
        if not all_finite(found):
            raise MalformedMessage("an array holds NaN, infinity, or values beyond float32")
        return torch.from_numpy(found)

    def _named(self, arrays: ArrayRecord) -> Mapping[str, Array]:
        """The arrays by name. A NumPyClient has none, and numbers its arrays in the order in which it got them."""
        wanted = [part.name for part in self.parts]
        differing = sorted(set(wanted).symmetric_difference(arrays))
        if not differing:
            return arrays
        numbers = [str(number) for number in range(len(wanted))]
        if set(arrays) != set(numbers):
            raise MalformedMessage(f"{len(arrays)} arrays instead of {len(wanted)}; differing: {differing[0]}")
        return {name: arrays[number] for name, number in zip(wanted, numbers, strict=True)}

    def record(self, params: Tensor) -> ArrayRecord:
        """The arrays with these parameters (num_params,), each in its own dtype and range: what is sent is finite."""
        vector, start, found = params.detach().cpu().numpy(), 0, dict(self.kept)
        for part in self.parts:
            if part.learned:
                values = vector[start : start + part.size].reshape(part.shape)
                start += part.size
                if part.dtype == "float16":
                    values = np.clip(values, -HALF, HALF)
                found[part.name] = values.astype(part.dtype)
        return ArrayRecord({part.name: Array(found[part.name]) for part in self.parts})

    def described(self) -> str:
        """Names, shapes, dtypes and what is learned, as JSON: the same for two runs that may follow one another."""
        return json.dumps([asdict(part) for part in self.parts])


def layout_of(arrays: ArrayRecord, *, frozen: Sequence[str] = ()) -> ArrayLayout:
    """The layout of the arrays that a run starts from.

    Floats are learned unless one of the patterns `frozen`, as in file names, fits their name.

    Raises:
      ConfigError: nothing is left to learn, a pattern fits no name, an array is of a dtype that has no place here, or
        a layer such as BatchNorm keeps running statistics that are not frozen.
    """
    values = {name: _initial(name, array) for name, array in arrays.items()}
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in values):
            raise ConfigError(f"frozen={pattern} fits no array; there are {', '.join(values)}")
    parts = []
    for name, found in values.items():
        fixed = any(fnmatchcase(name, pattern) for pattern in frozen)
        parts.append(ArrayPart(name, found.shape, str(found.dtype), str(found.dtype) in FLOATS and not fixed))
    _refuse_statistics(parts)
    if not any(part.learned and part.size for part in parts):
        raise ConfigError(
            "initial_arrays must hold an array of floats that is not frozen: nothing would be learned. Models of trees "
            "(xgboost) are bytes, which have no average"
        )
    return ArrayLayout(tuple(parts), {part.name: values[part.name] for part in parts if not part.learned})


def _initial(name: str, array: Array) -> Values:
    try:
        values = np.asarray(array.numpy(), order="C")  # as files hold them
    except (TypeError, ValueError) as error:
        raise ConfigError(f"initial_arrays: {name} can't be read: {error}") from error
    if str(values.dtype) not in KEPT:
        raise ConfigError(f"initial_arrays: {name} must be of one of {', '.join(KEPT)} (got {values.dtype})")
    if str(values.dtype) in FLOATS and not np.isfinite(values.astype(np.float32)).all():
        raise ConfigError(f"initial_arrays: {name} holds NaN, infinity, or values beyond float32")
    return values


def _refuse_statistics(parts: Sequence[ArrayPart]) -> None:
    """A running mean of activations is no change of parameters that noise leaves meaningful: noised, a variance is
    negative soon. And a layer that uses them mixes the examples of a batch."""
    for part in parts:
        layer, _, what = part.name.rpartition(".")
        if part.learned and what in STATISTICS:
            raise ConfigError(
                f"initial_arrays: {layer or part.name} keeps running statistics ({part.name}), as BatchNorm does: "
                "noise would make them useless. Replace such layers by GroupNorm, discreet.to_group_norm(model) does "
                'so; or leave the statistics as they are, which frozen=("*running_mean", "*running_var") asks for'
            )
