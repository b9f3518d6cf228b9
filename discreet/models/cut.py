"""The cut of a model before its first trained layer, whatever its forward: calls of frozen layers are recorded once for
each example, and replayed while the rest is trained.

The forward itself runs as it is in training too; only calls of frozen layers give what was recorded in place of
computing it. So nothing is traced, and residual sums, masks and shapes between layers need no care. A call is recorded
if it begins before anything has read a trained parameter, and if its results have a row for each example. Of the
results only those are kept that something else than a recorded call reads.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from discreet.models.dropout import dropout_layers
from discreet.models.models import to_train, trainable
from discreet.per_example.functions import function_of
from discreet.per_example.terms import unchanged
from discreet.per_example.trial import made_up

_TRIED, _AGREEMENT = (7, 5), 1e-5  # two counts of made-up examples, and how near the outputs must come
_PLAIN = (bool, int, float, str)
_TYPES = (torch.float32, torch.int64, torch.int32, torch.bool)


class Call(NamedTuple):
    """The call of a layer that is recorded: its name, and the structure and leaves of its result. A leaf is the place
    of a tensor among all that is recorded, or a plain value."""

    name: str
    structure: TreeSpec
    leaves: list[tuple[int | None, Any]]


class Column(NamedTuple):
    """A tensor of which each example has a row: the shape of the row, its type, and if the rest reads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_read: bool = True


class Reads(TorchFunctionMode):
    """Notes which of some tensors an operation reads. What tells nothing of values does not count, but for the device
    of whole numbers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.wanted, self.read = {id(value) for value in tensors}, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = function_of(func)
        for value in () if function.is_fact and function.name != "device" else tree_leaves((args, kwargs)):
            if id(value) in self.wanted and not (function.is_fact and value.is_floating_point()):
                self.read.add(id(value))
        return func(*args, **kwargs or {})


@dataclass(eq=False)
class Tape:
    """What calls of frozen layers gave, and how far a forward that replays them has come."""

    calls: list[Call]
    values: list[Tensor] = field(default_factory=list)
    at: int = 0

    def replayed(self, name: str, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The forward of a frozen layer: what was recorded, if this is the next call of the tape."""
        if self.at == len(self.calls) or self.calls[self.at].name != name:
            return type(layer).forward(layer, *args, **kwargs)
        _, structure, leaves = self.calls[self.at]
        self.at += 1
        return tree_unflatten([plain if at is None else self.values[at] for at, plain in leaves], structure)


class FrozenPart(nn.Module):
    """The rows that the rest of a model reads, from inputs (n, *input_shape): (n, k), or (n, *shape) if that is one
    tensor alone; float32. Whole numbers stand in them as floats.

    Args:
      model: runs up to the last recorded call; in training mode, which leaves frozen layers in evaluation mode.
      calls: those that are recorded.
      columns: of the inputs, and of the tensors in the calls.
    """

    def __init__(self, model: nn.Module, calls: list[Call], columns: list[Column]) -> None:
        super().__init__()
        self.model, self.calls, self.columns = model, calls, columns

    def forward(self, inputs: Tensor) -> Tensor:
        """Raises ValueError if the forward calls other layers, or gives other shapes, than it did when it was tried, or
        if a whole number is too large for a float."""
        found = [inputs, *self._recorded(inputs)]
        for value, column in zip(found, self.columns, strict=True):
            if (*value.shape, value.dtype) != (len(inputs), *column.shape, column.dtype):
                raise ValueError("a frozen layer gives other shapes than it did for made-up examples")
        read = [value for value, column in zip(found, self.columns, strict=True) if column.is_read]
        if len(read) == 1 and read[0].dtype == torch.float32:
            return read[0]
        rows = torch.cat([value.reshape(len(inputs), -1).float() for value in read], 1)
        if not all(torch.equal(value, value.float().to(value.dtype)) for value in read):
            raise ValueError("a whole number is too large for a float")
        return rows

    def _recorded(self, inputs: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        waiting = iter(self.calls)
        expected = next(waiting)

        def note(name: str, _layer: nn.Module, _given: Any, output: Any) -> None:
            nonlocal expected
            if name != expected.name:
                return
            leaves, structure = tree_flatten(output)
            if structure != expected.structure:
                raise ValueError("a frozen layer gives another structure than it did for made-up examples")
            found.extend(leaf for leaf, (at, _) in zip(leaves, expected.leaves, strict=True) if at is not None)
            following = next(waiting, None)
            if following is None:
                raise _AllRecordedError
            expected = following

        names = {call.name for call in self.calls}
        hooks = [self.model.get_submodule(name).register_forward_hook(partial(note, name)) for name in names]
        try:
            self.model(inputs)
        except _AllRecordedError:
            return found
        finally:
            for hook in hooks:
                hook.remove()
        raise ValueError("the forward does not call the frozen layers that it called for made-up examples")


class _AllRecordedError(Exception):
    """Ends a forward whose rest need not be computed."""


class Rest(nn.Module):
    """The outputs of a model from the rows of its `FrozenPart`. It shares the trained parameters with the model."""

    def __init__(self, model: nn.Module, tape: Tape, columns: list[Column]) -> None:
        super().__init__()
        self.model, self.tape, self.columns = model, tape, columns

    def forward(self, rows: Tensor) -> Any:
        """Raises ValueError if the forward does not call the frozen layers that were recorded."""
        return self.replay(self._unpacked(rows))

    def replay(self, values: Sequence[Tensor]) -> Any:
        """The outputs from the inputs and the tensors in the recorded calls."""
        inputs, *self.tape.values = values
        self.tape.at = 0
        try:
            outputs = self.model(inputs)
        finally:
            self.tape.values = []
        if self.tape.at < len(self.tape.calls):
            raise ValueError("the forward does not call the frozen layers that were recorded")
        return outputs

    def _unpacked(self, rows: Tensor) -> list[Tensor]:
        """What is not read is NaN, or if it holds whole numbers on no device: an error if something reads it after
        all."""
        read = [column for column in self.columns if column.is_read]
        alone, found, at = len(read) == 1 and read[0].dtype == torch.float32, list[Tensor](), 0
        for shape, dtype, is_read in self.columns:
            if not is_read:
                ones = (len(rows), *(1 for _ in shape))
                none = rows.new_full(ones, math.nan) if dtype.is_floating_point else rows.new_empty(ones, device="meta")
                found.append(none.to(dtype).expand(len(rows), *shape))
                continue
            size = torch.Size(shape).numel()
            part = rows if alone else rows[:, at : at + size].reshape(len(rows), *shape)
            found.append(part if dtype == torch.float32 else part.to(dtype))
            at += size
        return found


def cut(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, nn.Module]:
    """A model in two parts: what gives rows from inputs, and what gives outputs from the rows and learns. Neither holds
    the model itself. Of `inputs` only the type and the shape are used.

    Raises:
      ValueError: with the reason, if the model can't be cut; and what a model raises that can't be copied.
    """
    to_train(model)
    tried = [made_up(model, inputs, count) for count in _TRIED]
    calls, columns, counts = _tried(model, tried[0])
    layers = dict(model.named_modules())
    if not any(_works(layers[call.name]) for call in calls):
        raise ValueError("no frozen layer that multiplies matrices is called before a trained parameter is read")
    begins = type(model) is nn.Sequential and unchanged(model) and columns[-1].dtype == torch.float32
    if begins and [call.name for call in calls] == [*dict(model.named_children())][: len(calls)]:
        return model[: len(calls)], model[len(calls) :]  # type: ignore[index]
    rest = Rest(_shared_copy(model), Tape(calls), columns)
    for name in dict.fromkeys(call.name for call in calls):
        layer = rest.model.get_submodule(name)
        layer.forward = partial(rest.tape.replayed, name, layer)
        if counts[name] == sum(call.name == name for call in calls):
            _empty(layer)
    part = FrozenPart(_shared_copy(model), calls, columns)
    with torch.no_grad():
        values = [tried[0], *part._recorded(tried[0])]
        with Reads(values) as reads:
            rest.replay(values)
        rest.columns[:] = [
            column._replace(is_read=id(value) in reads.read) for column, value in zip(columns, values, strict=True)
        ]
        if any(column.is_read and column.dtype not in _TYPES for column in columns):
            raise ValueError("the features are neither float32 nor whole numbers")
        for some in tried:
            _check_same(model, lambda given: rest(part(given)), some)
    return part, rest


def _check_same(model: nn.Module, parts: Callable[[Tensor], Any], inputs: Tensor) -> None:
    """ValueError unless the parts give what the model gives, with the same masks of dropout."""
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        wanted = model(inputs)
        torch.set_rng_state(state)
        found = parts(inputs)
    if found.device != wanted.device or not torch.allclose(found, wanted, rtol=_AGREEMENT, atol=_AGREEMENT):
        raise ValueError("its parts give other outputs than the whole")


def _shared_copy(model: nn.Module) -> nn.Module:
    """The modules again, over the same parameters and buffers."""
    return copy.deepcopy(model, {id(value): value for value in (*model.parameters(), *model.buffers())})


def _empty(layer: nn.Module) -> None:
    """Takes the values of a layer that computes nothing any more; its parameters keep names and types."""
    for part in layer.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.new_empty(0), requires_grad=False)


def _works(layer: nn.Module) -> bool:
    """True if computing what a layer gives costs more than reading it again: no table of embeddings alone."""
    parts = [part for part in layer.modules() if not isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    held = (value for part in parts for values in (part._parameters, part._buffers) for value in values.values())
    return any(value is not None and value.dim() > 1 for value in held)


@dataclass
class _Seen:
    """A call of a layer in the trial, and the calls in it."""

    name: str
    parts: list[_Seen] = field(default_factory=list)
    output: Any = None
    stays: bool = False

    def outermost(self, count: int) -> Iterator[_Seen]:
        """The outermost calls that never change and have a row for each of `count` examples, in their order."""
        values = [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)]
        if self.stays and values and all(value.dim() and len(value) == count for value in values):
            yield self
        else:
            for part in self.parts:
                yield from part.outermost(count)


def _tried(model: nn.Module, inputs: Tensor) -> tuple[list[Call], list[Column], Counter[str]]:
    """The calls to record, the inputs and their tensors, and how often each layer is called in all."""
    calls, columns, counts = list[Call](), [Column(tuple(inputs.shape[1:]), inputs.dtype)], Counter[str]()
    with _seen(model) as top, torch.no_grad():
        model(inputs)
    waiting = [top]
    while waiting:
        seen = waiting.pop()
        counts[seen.name] += 1
        waiting += seen.parts
    for seen in top.outermost(len(inputs)):
        found, structure = tree_flatten(seen.output)
        leaves = list[tuple[int | None, Any]]()
        for leaf in found:
            if isinstance(leaf, Tensor):
                leaves.append((len(columns) - 1, None))
                columns.append(Column(tuple(leaf.shape[1:]), leaf.dtype))
            else:
                leaves.append((None, leaf if isinstance(leaf, _PLAIN) else None))
        calls.append(Call(seen.name, structure, leaves))
    return calls, columns, counts


@contextmanager
def _seen(model: nn.Module) -> Iterator[_Seen]:
    """Within it each call of a layer is noted, in the calls around it."""
    names = {layer: name for name, layer in model.named_modules()}
    still = {layer for layer in names if unchanged(layer) and not trainable(layer)}
    drawing = {layer for layer in dropout_layers(model) if layer.training}
    open_calls, reads = [_Seen("")], Reads(trainable(model))

    def begun(layer: nn.Module, _: Any) -> None:
        call = _Seen(names[layer])
        open_calls[-1].parts.append(call)
        open_calls.append(call)
        if layer in drawing:
            reads.read.add(id(layer))  # what comes after may follow from masks

    def ended(layer: nn.Module, _: Any, output: Any) -> None:
        call = open_calls.pop()
        call.output, call.stays = output, layer in still and not reads.read

    hooks = [layer.register_forward_pre_hook(begun) for layer in names]
    hooks += [layer.register_forward_hook(ended) for layer in names]
    try:
        with reads:
            yield open_calls[0]
    finally:
        for hook in hooks:
            hook.remove()
