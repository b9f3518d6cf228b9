"""Functions of PyTorch that read trainable parameters, each with the parameter's part of the gradient of each example.

A function with a rule runs as PyTorch runs it, and notes on the tape where its output gradients will appear and what
terms follow from them. A parameter that is used in another way (added, scaled, in an einsum) is copied for each
example, and the gradients of the copies are built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from discreet.per_example.convolution import Geometry, built, weight_term
from discreet.per_example.functions import DRAWING
from discreet.per_example.layouts import CONSTANT, FIRST, Layout, Mixed, Unserved, leaves, place
from discreet.per_example.operations import CHECKS, Call, einsum_names, matrix_names
from discreet.per_example.terms import Lookup, Outer, Pair, Slot, Tape, Term


@dataclass(frozen=True, slots=True)
class Weight:
    """A value that follows from trainable parameters alone.

    Attributes:
      slot: of a parameter itself, None for what is computed from parameters.
      terms: of the parameters, from the gradient of each example by the value, (n, *shape).
      roots: the parameters.
    """

    slot: Slot | None
    terms: Callable[[Tensor], list[Term]]
    roots: tuple[Tensor, ...]

    def reshaped(self, shape: torch.Size) -> Weight:
        """The same value with dimensions of size 1 left out; `shape`: with them."""
        return Weight(None, lambda grads: self.terms(grads.reshape(len(grads), *shape)), self.roots)

    def looked_up(self, ids: Tensor, padding: int) -> Weight:
        """Rows of a table by constant numbers, the same for every example."""
        slot = self.slot
        assert slot is not None

        def terms(grads: Tensor) -> list[Term]:
            return [_lookup(slot, ids.expand(len(grads), *ids.shape), grads, padding)]

        return Weight(None, terms, self.roots)


class Watcher(Protocol):
    """The keeper of what is known of the tensors of a pass: see `watch.Watch`."""

    tape: Tape
    count: int

    def tag(self, value: Tensor) -> Any: ...
    def give(self, value: Tensor, tag: Any) -> Tensor: ...
    def copies(self, value: Tensor, weight: Weight, *, place: int = -1) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of a function, before it runs.

    Attributes:
      tags: what is known of its tensors.
      counted: whether an argument counts examples.
    """

    watch: Watcher
    func: Any
    name: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    tensors: list[Tensor]
    tags: list[Any]
    counted: bool

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.named.get(name, default)

    def layout(self, value: Any) -> Layout | None:
        """The layout of a tensor of the examples, None for another value."""
        tag = self.watch.tag(value) if isinstance(value, Tensor) else None
        return tag if isinstance(tag, Layout) else None

    def weight(self, value: Any) -> Weight | None:
        tag = self.watch.tag(value) if isinstance(value, Tensor) else None
        return tag if isinstance(tag, Weight) else None

    def run(self) -> Any:
        return self.func(*self.args, **self.named)

    @property
    def drawn(self) -> bool:
        """True if there are random numbers in what it gives."""
        return self.name in DRAWING or any(getattr(tag, "drawn", False) for tag in self.tags)

    @property
    def is_known(self) -> bool:
        """True if everything that it reads is of the examples, or a constant, or a parameter."""
        return all(isinstance(tag, Layout | Weight) or tag == CONSTANT for tag in self.tags)

    @property
    def tape(self) -> Tape:
        return self.watch.tape

    def note(self, outputs: Tensor, terms: Callable[[Tensor], list[Term]], *weights: Weight | None) -> None:
        """Notes a call, if there is something to be trained and the loss can reach it."""
        if any(weight is not None for weight in weights) and outputs.requires_grad:
            self.tape.add(outputs, terms)


Ruled = tuple[Any, Any]  # the result, and what is known of it
Rule = Callable[[Operation], Ruled]


def _positions(layout: Layout, values: Tensor) -> Tensor:
    """(n, d), or (n, T, d) with all other dimensions as positions."""
    values = layout.first(values)
    return values if values.dim() == 2 else values.flatten(1, -2)


def product_terms(
    weight: Weight | None, bias: Weight | None, inputs: Tensor, grads: Tensor, *, turned: bool = False
) -> list[Term]:
    """Terms for outputs = inputs @ weight.T + bias, or with `turned` inputs @ weight + bias.

    Args:
      inputs: (n, d) or (n, T, d).
      grads: (n, p) or (n, T, p).
    """
    slot = weight.slot if weight is not None else None
    if grads.dim() == 2 and not turned and (slot is not None or weight is None) and (bias is None or bias.slot):
        return [Pair(slot, bias.slot if bias is not None else None, inputs, grads)]
    if grads.dim() == 2:
        inputs, grads = inputs.unsqueeze(1), grads.unsqueeze(1)
    terms: list[Term] = [] if bias is None else bias.terms(grads.sum(1))
    if weight is None:
        return terms
    left, right = (grads, inputs) if turned else (inputs, grads)
    if slot is not None:
        return [Outer(slot, left, right), *terms]
    return [*weight.terms(torch.bmm(right.transpose(1, 2), left)), *terms]


def _product(operation: Operation, inputs: Tensor, weight: Any, bias: Any, *, turned: bool) -> Ruled:
    layout = operation.layout(inputs)
    if layout is None or operation.layout(weight) or operation.layout(bias) or weight.dim() > 2:
        raise Unserved(operation.name)
    outputs = operation.run()
    if layout.dim == inputs.dim() - 1:
        return outputs, Mixed(f"{operation.name} adds up examples", surely=True)
    held, added = operation.weight(weight), operation.weight(bias)
    if held is not None and weight.dim() < 2:
        raise Unserved(operation.name)

    def terms(grads: Tensor) -> list[Term]:
        return product_terms(held, added, _positions(layout, inputs), _positions(layout, grads), turned=turned)

    operation.note(outputs, terms, held, added)
    return outputs, layout


def _linear(operation: Operation) -> Ruled:
    inputs, weight, bias = (operation.argument(place, name) for place, name in enumerate(("input", "weight", "bias")))
    if weight.dim() < 2:
        raise Unserved("linear with a vector")
    return _product(operation, inputs, weight, bias, turned=False)


def _addmm(operation: Operation) -> Ruled:
    bias, inputs, weight = operation.args[:3]
    if operation.named or len(operation.args) > 3 or operation.layout(bias) or operation.layout(weight):
        return _checked(operation)
    if bias.dim() > 1 and operation.weight(bias):
        raise Unserved("addmm of a matrix")
    return _product(operation, inputs, weight, bias, turned=True)


def _matmul(operation: Operation) -> Ruled:
    left, right = (operation.argument(place, name) for place, name in enumerate(("input", "other")))
    if operation.weight(right) and right.dim() == 2 and operation.layout(left):
        return _product(operation, left, right, None, turned=True)
    if operation.weight(left) or operation.weight(right):
        one, other, result = matrix_names(left.dim(), right.dim())
        return _einsum_of(operation, [one, other], result, [left, right])
    return _checked(operation)


def _einsum(operation: Operation) -> Ruled:
    parts = list(operation.args[1:] if isinstance(operation.args[1], Tensor) else operation.args[1])
    if not any(operation.weight(part) for part in parts):
        return _checked(operation)
    labels, result = einsum_names(operation.args[0])
    return _einsum_of(operation, labels, result, parts)


def _einsum_of(operation: Operation, labels: Sequence[str], result: str, parts: Sequence[Tensor]) -> Ruled:
    """A sum of products in which parameters are copied: their copies have the letter of the examples too."""
    pairs = list(zip(labels, parts, strict=True))
    letters = {(names[held.dim], held) for names, part in pairs if (held := operation.layout(part)) is not None}
    if len(letters) != 1:
        return operation.run(), Mixed(f"{operation.name} pairs examples with each other", surely=True)
    ((letter, layout),) = letters
    if (layout.before, layout.after) != (1, 1) or letter not in result:
        raise Unserved(operation.name)
    named, given = [], []
    for names, part in pairs:
        weight = operation.weight(part)
        if operation.layout(part) is None and letter in names:
            raise Unserved(f"{operation.name} reads a parameter by the place of an example")
        named.append(letter + names if weight else names)
        given.append(operation.watch.copies(part, weight) if weight else part)
    return torch.einsum(",".join(named) + "->" + result, *given), Layout(result.index(letter))


def _checked(operation: Operation) -> Ruled:
    """A function without parameters: what the layouts of its arguments say."""
    result = operation.run()
    tensors = [value for value in (*operation.args, *operation.named.values()) if isinstance(value, Tensor)]
    parts = [value for part in operation.args if isinstance(part, list | tuple) for value in part]
    tags = {id(value): operation.layout(value) for value in (*tensors, *parts) if isinstance(value, Tensor)}
    call = Call(operation.name, operation.args, operation.named, result, tags, operation.watch.count)
    return result, CHECKS[operation.name](call)


def _convolution(dims: int, *, turned: bool = False) -> Rule:
    """A convolution; `turned`: a transposed one, in which inputs and output gradients change their parts."""

    def rule(operation: Operation) -> Ruled:
        inputs, weight, bias = (operation.argument(at, name) for at, name in enumerate(("input", "weight", "bias")))
        layout = operation.layout(inputs)
        if layout is None or inputs.dim() != dims + 2 or operation.layout(weight) or operation.layout(bias):
            raise Unserved(operation.name)
        args = list(operation.args)
        if dims == 2 and not turned:  # patches are then runs of memory, and pooling is several times as fast
            args[:2] = (x.contiguous(memory_format=torch.channels_last) for x in (inputs, weight))
            inputs = args[0]
        outputs = operation.func(*args, **operation.named)
        if layout.dim != 0:
            return outputs, Mixed(f"{operation.name} works along the examples", surely=True)
        held, added, order = operation.weight(weight), operation.weight(bias), operation.tape.order
        if turned and any(extra for extra in leaves(operation.argument(5, "output_padding", 0))):
            raise Unserved(f"{operation.name} with output_padding")
        geometry = _geometry(operation, weight.shape[2:], dims, turned=turned)

        def terms(grads: Tensor) -> list[Term]:
            images, others = (grads, inputs) if turned else (inputs, grads)
            rows = others.movedim(1, -1).flatten(1, -2)
            sums = grads.flatten(2).sum(2) if turned else rows.sum(1)
            found = [] if added is None else added.terms(summed(layout, sums))
            if held is None:
                return found
            if layout == FIRST and held.slot is not None:
                return [weight_term(held.slot, geometry, images, rows, order), *found]
            values = summed(layout, built(geometry, images, rows))
            values = values.view(*values.shape[:2], *geometry.kernel, -1).movedim(-1, 2)
            return [*held.terms(values), *found]

        operation.note(outputs, terms, held, added)
        return outputs, layout

    return rule


def summed(layout: Layout, values: Tensor) -> Tensor:
    """The sums over what belongs to one example, from (before * n * after, ...) to (n, ...)."""
    return values if layout == FIRST else layout.first(values).sum((1, 2))


def _geometry(operation: Operation, kernel: Sequence[int], dims: int, *, turned: bool) -> Geometry:
    def each(place: int, name: str, default: int) -> tuple[int, ...]:
        value = operation.argument(place, name, default)
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)

    stride, dilation = each(3, "stride", 1), each(7 if turned else 5, "dilation", 1)
    groups: int = operation.argument(6, "groups", 1)
    padding = operation.argument(4, "padding", 0)
    if isinstance(padding, str):
        total = [dil * (size - 1) if padding == "same" else 0 for dil, size in zip(dilation, kernel, strict=True)]
        sides = tuple((each // 2, each - each // 2) for each in total)
    else:
        sides = tuple((side, side) for side in each(4, "padding", 0))
    return Geometry(tuple(kernel), stride, dilation, sides, groups)


def _lookup(slot: Slot, ids: Tensor, grads: Tensor, padding: int) -> Term:
    places = ids.long().reshape(len(ids), -1)
    rows = grads.reshape(*places.shape, grads.shape[-1])
    return Lookup(slot, places, rows if padding < 0 else rows.masked_fill((places == padding).unsqueeze(2), 0))


def _embedding(operation: Operation) -> Ruled:
    weight, ids = operation.argument(0, "weight"), operation.argument(1, "input")
    padding = operation.argument(2, "padding_idx", -1)
    layout, held = operation.layout(ids), operation.weight(weight)
    if layout is None or operation.layout(weight) or (held is not None and held.slot is None):
        raise Unserved("embedding in a table that is computed")
    outputs = operation.run()
    if held is not None and held.slot is not None:
        slot = held.slot
        operation.note(outputs, lambda g: [_lookup(slot, layout.first(ids), layout.first(g), padding)], held)
    return outputs, layout


def _embedding_bag(operation: Operation) -> Ruled:
    ids, weight, padding = operation.args[0], operation.args[1], operation.named.get("padding_idx")
    mode, layout, held = operation.named.get("mode", "mean"), operation.layout(ids), operation.weight(weight)
    given = operation.named.get("per_sample_weights"), operation.named.get("offsets")
    if layout != FIRST or ids.dim() != 2 or mode not in ("sum", "mean") or any(each is not None for each in given):
        raise Unserved("embedding_bag of bags that are not the rows of a matrix")
    outputs = operation.run()
    if held is not None:
        slot = held.slot
        if slot is None:
            raise Unserved("embedding_bag in a table that is computed")

        def terms(grads: Tensor) -> list[Term]:
            shares = torch.ones_like(ids, dtype=grads.dtype) if padding is None else (ids != padding).to(grads)
            if mode == "mean":
                shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
            return [Lookup(slot, ids.long(), shares.unsqueeze(2) * grads.unsqueeze(1))]

        operation.note(outputs, terms, held)
    return outputs, layout


WEIGHT_RULES: dict[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
    **{f"conv{dims}d": _convolution(dims) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _convolution(dims, turned=True) for dims in (1, 2, 3)},
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
}


def with_copies(ran: Operation) -> Operation:
    """An operation on elements, or attention, with copies in place of its parameters, beside the examples' layout.

    Raises:
      Unserved: another operation, or a parameter that has as many rows as there are examples.
    """
    wide, watch = max(value.dim() for value in ran.tensors), ran.watch
    layouts = {held.at(held.dim + wide - value.dim()) for value in ran.tensors if (held := ran.layout(value))}
    if ran.name.rstrip("_") not in (*ELEMENTWISE, "scaled_dot_product_attention") or len(layouts) != 1:
        raise Unserved(f"{ran.name} of a parameter{place()}")
    (layout,) = layouts

    def beside(value: Any) -> Any:
        weight = ran.weight(value)
        if weight is None:
            return value
        spot = layout.dim - wide + value.dim()  # where the examples would be in the parameter
        if spot >= 0 and value.shape[spot] != 1:
            raise Unserved(f"{ran.name} of a parameter by the place of an example{place()}")
        spread, dim = watch.copies(value, weight, place=spot), max(spot, 0)
        if (layout.before, layout.after) != (1, 1):
            spread = torch.cat([spread.repeat_interleave(layout.after, dim)] * layout.before, dim)
        return watch.give(spread, layout.at(layout.dim - wide + spread.dim()))

    args, named = tuple(map(beside, ran.args)), {key: beside(value) for key, value in ran.named.items()}
    tensors = [value for value in leaves((args, named)) if isinstance(value, Tensor)]
    return replace(ran, args=args, named=named, tensors=tensors, tags=[watch.tag(value) for value in tensors])


ELEMENTWISE = {name for name, check in CHECKS.items() if check is CHECKS["add"]}
