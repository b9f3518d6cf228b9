"""Cuts any model before its first trained layer: calls of frozen layers are recorded once for each
example, and replayed while the rest is trained.

Training runs the same forward; only calls of frozen layers return recorded results instead of
computing them. So nothing is traced, and residual sums, masks and shapes between layers need no
special treatment. A call is recorded if it ends before anything has read a trained parameter or
drawn a mask, and if its results have a row for each example. A result is kept only if it is read
outside recorded calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from discreet.layers.functions import function_of
from discreet.models.models import dropout_layers, to_train, trainable
from discreet.per_example.perceptron import unchanged
from discreet.per_example.trial import made_up, same_chance

# numbers of made-up examples on which the parts are tried; the tolerance of the outputs
_COUNTS = (7, 5)
_AGREEMENT = 1e-5
_TYPES = (torch.float32, torch.int64, torch.int32, torch.bool)  # types that the rest may read


class Call(NamedTuple):
    """A recorded call of a layer: its name, the structure of its result, and for each leaf the
    index of a recorded tensor, or a plain value."""

    name: str
    structure: TreeSpec
    leaves: list[tuple[int | None, Any]]


class RowForm(NamedTuple):
    """A tensor with a row for each example: the shape of a row, the type, and True if the rest
    reads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_read: bool = True


class Reads(TorchFunctionMode):
    """Notes which of some tensors an operation reads. Operations that reveal nothing about values
    do not count, except the device of whole numbers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.wanted = {id(value) for value in tensors}
        self.read = set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = function_of(func)
        for value in (
            () if function.is_fact and function.name != "device" else tree_leaves((args, kwargs))
        ):
            if id(value) in self.wanted and not (function.is_fact and value.is_floating_point()):
                self.read.add(id(value))
        return func(*args, **kwargs or {})


class FrozenPart(nn.Module):
    """Maps inputs (n, *input_shape) to the rows that the rest of a model reads, float32: one tensor
    (n, *shape), or several joined to (n, k), with whole numbers as floats. `columns`: those of the
    inputs, and of the tensors in the calls."""

    def __init__(self, model: nn.Module, calls: list[Call], columns: list[RowForm]) -> None:
        super().__init__()
        self.model = model
        self.calls = calls
        self.columns = columns

    def forward(self, inputs: Tensor) -> Tensor:
        """The rows. Raises as `of` and `recorded`."""
        return self.of(inputs, self.recorded(inputs))

    def of(self, inputs: Tensor, recorded: Sequence[Tensor]) -> Tensor:
        """The rows from recorded tensors. Raises ValueError if their shapes differ from those in
        the trial, or if a whole number is too large for a float."""
        values = [inputs, *recorded]
        if [(*value.shape[1:], value.dtype) for value in values] != [
            (*each.shape, each.dtype) for each in self.columns
        ]:
            raise ValueError("frozen layers give other shapes than they did for made-up examples")
        read = [value for value, column in zip(values, self.columns, strict=True) if column.is_read]
        if _alone(self.columns):
            return read[0]
        if not all(torch.equal(value, value.float().to(value.dtype)) for value in read):
            raise ValueError("a whole number is too large for a float")
        return torch.cat([value.reshape(len(inputs), -1).float() for value in read], 1)

    def recorded(self, inputs: Tensor) -> list[Tensor]:
        """The tensors in the calls. The forward stops after the last one. Raises ValueError if it
        calls other layers than in the trial."""
        found = list[Tensor]()
        waiting = list(reversed(self.calls))

        def note(name: str, _layer: nn.Module, _given: Any, output: Any) -> None:
            if name == waiting[-1].name:
                found.extend(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
                waiting.pop()
                if not waiting:
                    raise _AllRecordedError

        names = {call.name for call in self.calls}
        hooks = [
            self.model.get_submodule(name).register_forward_hook(partial(note, name))
            for name in names
        ]
        try:
            self.model(inputs)
        except _AllRecordedError:
            return found
        finally:
            for hook in hooks:
                hook.remove()
        raise ValueError(
            "the forward does not call the frozen layers that it called for made-up examples"
        )


class _AllRecordedError(Exception):
    """Ends a forward whose rest need not be computed."""


class Rest(nn.Module):
    """Maps the rows of a `FrozenPart` to the outputs of the model; same arguments. The parameters
    are shared."""

    def __init__(self, model: nn.Module, calls: list[Call], columns: list[RowForm]) -> None:
        super().__init__()
        self.model = model
        self.calls = calls
        self.columns = columns
        self.waiting = list[Call]()
        self.values = list[Tensor]()
        for name in dict.fromkeys(call.name for call in calls):
            layer = model.get_submodule(name)
            layer.forward = partial(self._called, name, layer)

    def _called(self, name: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.waiting or self.waiting[-1].name != name:
            return type(layer).forward(layer, *args, **kwargs)
        _, structure, leaves = self.waiting.pop()
        return tree_unflatten(
            [plain if at is None else self.values[at] for at, plain in leaves], structure
        )

    def forward(self, rows: Tensor) -> Any:
        """Raises ValueError if the forward does not call the frozen layers that were recorded."""
        return self.replay(self._columns_of(rows))

    def replay(self, values: Sequence[Tensor]) -> Any:
        """The outputs from the inputs and the tensors in the calls."""
        self.values, self.waiting = [*values], list(reversed(self.calls))
        try:
            outputs = self.model(values[0])
        finally:
            self.values = []
        if self.waiting:
            raise ValueError("the forward does not call the frozen layers that were recorded")
        return outputs

    def made_up_rows(self, rows: Tensor) -> Tensor:
        """Rows between 0 and 1, with 0 and 1 for whole numbers and 1 alone in the last row."""
        read = [column for column in self.columns if column.is_read]
        floats = [
            column.dtype == torch.float32 for column in read for _ in range(math.prod(column.shape))
        ]
        whole = rows.round()
        whole[-1:] = 1
        if _alone(self.columns):
            return rows
        return torch.where(torch.tensor(floats, device=rows.device), rows, whole)

    def _columns_of(self, rows: Tensor) -> list[Tensor]:
        """The tensors in rows. A tensor that must not be read is NaN, or has no device if it holds
        whole numbers, so that reading it is an error."""
        found = list[Tensor]()
        at = 0
        alone = _alone(self.columns)
        for column in self.columns:
            if column.is_read:
                size = math.prod(column.shape)
                if alone:
                    part = rows
                else:
                    part = rows[:, at : at + size].reshape(len(rows), *column.shape)
                part = part.clone()  # the forward may overwrite it
                at += size
            else:
                ones = (len(rows), *(1 for _ in column.shape))
                if column.dtype.is_floating_point:
                    part = rows.new_full(ones, math.nan)
                else:
                    part = rows.new_empty(ones).to("meta")
                part = part.expand(len(rows), *column.shape)
            found.append(part if column.dtype == torch.float32 else part.to(column.dtype))
        return found


def cut(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, nn.Module]:
    """A model in two parts: the first maps inputs to rows, the second maps rows to outputs and
    learns. They share their parameters with the model. Only the type and the shape of `inputs` are
    used. Raises ValueError with the reason if the model can't be cut, and any error of copying the
    model."""
    to_train(model)
    tried = [made_up(model, inputs, count) for count in _COUNTS]
    calls, columns, others = _calls_of(model, tried[0])
    layers = dict(model.named_modules())
    if not any(_works(layers[call.name]) for call in calls):
        raise ValueError(
            "no frozen layer that multiplies matrices is called before a trained parameter is read"
        )
    plain = type(model) is nn.Sequential and unchanged(model) and columns[-1].dtype == torch.float32
    if plain and [call.name for call in calls] == [*model._modules][: len(calls)]:
        return model[: len(calls)], model[len(calls) :]  # type: ignore[index]
    part = FrozenPart(_shared_copy(model), calls, columns)
    rest = Rest(_shared_copy(model), calls, columns)
    for name in {call.name for call in calls} - others:
        _empty(rest.model.get_submodule(name))
    with torch.no_grad():
        values = [tried[0], *part.recorded(tried[0])]
        with Reads(values) as reads:
            rest.replay(values)
        columns[:] = [
            column._replace(is_read=id(value) in reads.read)
            for column, value in zip(columns, values, strict=True)
        ]
        if any(column.is_read and column.dtype not in _TYPES for column in columns):
            raise ValueError("the features are neither float32 nor whole numbers")
        for some in tried:
            with same_chance(some.device):
                wanted = model(some)
            with same_chance(some.device):
                found = rest(part(some))
            if not torch.allclose(found, wanted, rtol=_AGREEMENT, atol=_AGREEMENT):
                raise ValueError("its parts give other outputs than the whole")
    return part, rest


def _alone(columns: list[RowForm]) -> bool:
    """True if the rows are a single tensor without conversion."""
    read = [column for column in columns if column.is_read]
    return len(read) == 1 and read[0].dtype == torch.float32


def _shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules with the same parameters and buffers."""
    return copy.deepcopy(
        model, {id(value): value for value in (*model.parameters(), *model.buffers())}
    )


def _empty(layer: nn.Module) -> None:
    """Empties the parameters of a layer that is no longer computed; names and types stay."""
    for part in layer.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.new_empty(0), requires_grad=False)


def _works(layer: nn.Module) -> bool:
    """True if computing a layer's result takes longer than reading it; not for a mere embedding
    table."""
    parts = [
        part for part in layer.modules() if not isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    held = (
        value
        for part in parts
        for values in (part._parameters, part._buffers)
        for value in values.values()
    )
    return any(value is not None and value.dim() > 1 for value in held)


@dataclass
class _Seen:
    """A call of a layer in the trial, with its inner calls."""

    name: str
    parts: list[_Seen] = field(default_factory=list)
    output: Any = None
    stays: bool = False

    def outermost(self, count: int) -> Iterator[_Seen]:
        """The outermost calls that never change and have a row for each of `count` examples, in
        their order."""
        values = [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)]
        if self.stays and values and all(value.dim() and len(value) == count for value in values):
            yield self
        else:
            for part in self.parts:
                yield from part.outermost(count)


def _calls_of(model: nn.Module, inputs: Tensor) -> tuple[list[Call], list[RowForm], set[str]]:
    """The calls to record; the inputs and the tensors in them; and the names of layers that have
    other calls too."""
    calls = list[Call]()
    columns = [RowForm(tuple(inputs.shape[1:]), inputs.dtype)]
    with _seen(model) as every, torch.no_grad():
        model(inputs)
    recorded = list(every[0].outermost(len(inputs)))
    for seen in recorded:
        found, structure = tree_flatten(seen.output)
        leaves = list[tuple[int | None, Any]]()
        for leaf in found:
            if isinstance(leaf, Tensor):
                leaves.append((len(columns), None))
                columns.append(RowForm(tuple(leaf.shape[1:]), leaf.dtype))
            else:
                leaves.append((None, leaf if isinstance(leaf, bool | int | float | str) else None))
        calls.append(Call(seen.name, structure, leaves))
    return (
        calls,
        columns,
        {seen.name for seen in every if all(seen is not each for each in recorded)},
    )


@contextmanager
def _seen(model: nn.Module) -> Iterator[list[_Seen]]:
    """A context in which each call of a layer is noted in the call around it, in order; the first
    entry is the outermost call."""
    names = {layer: name for name, layer in model.named_modules()}
    still = {layer for layer in names if unchanged(layer) and not trainable(layer)}
    drawing = {layer for layer in dropout_layers(model) if layer.training}
    every = [_Seen("")]
    reads = Reads(trainable(model))
    around = every[:]

    def begun(layer: nn.Module, _: Any) -> None:
        call = _Seen(names[layer])
        for calls in (around[-1].parts, around, every):
            calls.append(call)
        if layer in drawing:
            reads.read.add(id(layer))  # later results may depend on masks

    def ended(layer: nn.Module, _: Any, output: Any) -> None:
        call = around.pop()
        call.output = output
        call.stays = layer in still and not reads.read

    hooks = [layer.register_forward_pre_hook(begun) for layer in names]
    hooks += [layer.register_forward_hook(ended) for layer in names]
    try:
        with reads:
            yield every
    finally:
        for hook in hooks:
            hook.remove()
