"""Functions of PyTorch that read trainable parameters, each with the parameter's part of the gradient of each example.

A function with a rule runs as PyTorch runs it, and notes on the tape where its output gradients will appear and what
terms follow from them. A parameter that is used in another way (added, scaled, in an einsum) is copied for each
example, and the gradients of the copies are built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from discreet.per_example.calls import Call, Weight
from discreet.per_example.convolution import Geometry, built, weight_term
from discreet.per_example.layouts import FIRST, Layout, Mixed, Unserved, leaves, place
from discreet.per_example.operations import CHECKS, einsum_names, matrix_names
from discreet.per_example.terms import Lookup, Outer, Pair, Slot, Term

Ruled = tuple[Any, Any]  # the result, and what is known of it
Rule = Callable[[Call], Ruled]


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
    inputs = inputs.to(grads.dtype)
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


def _product(call: Call, inputs: Tensor, weight: Any, bias: Any, *, turned: bool) -> Ruled:
    layout = call.layout(inputs)
    if layout is None or call.layout(weight) or call.layout(bias) or weight.dim() > 2:
        raise Unserved(call.name)
    outputs = call.run()
    if layout.dim == inputs.dim() - 1:
        return outputs, Mixed(f"{call.name} adds up examples", surely=True)
    held, added = call.weight(weight), call.weight(bias)
    if held is not None and weight.dim() < 2:
        raise Unserved(call.name)

    def terms(grads: Tensor) -> list[Term]:
        return product_terms(held, added, _positions(layout, inputs), _positions(layout, grads), turned=turned)

    call.note(outputs, terms, held, added)
    return outputs, layout


def _linear(call: Call) -> Ruled:
    inputs, weight, bias = (call.argument(place, name) for place, name in enumerate(("input", "weight", "bias")))
    if weight.dim() < 2:
        raise Unserved("linear with a vector")
    return _product(call, inputs, weight, bias, turned=False)


def _addmm(call: Call) -> Ruled:
    bias, inputs, weight = call.args[:3]
    if call.named or len(call.args) > 3 or call.layout(bias) or call.layout(weight):
        return _checked(call)
    if bias.dim() > 1 and call.weight(bias):
        raise Unserved("addmm of a matrix")
    return _product(call, inputs, weight, bias, turned=True)


def _matmul(call: Call) -> Ruled:
    left, right = (call.argument(place, name) for place, name in enumerate(("input", "other")))
    if call.weight(right) and right.dim() == 2 and call.layout(left):
        return _product(call, left, right, None, turned=True)
    if call.weight(left) or call.weight(right):
        one, other, result = matrix_names(left.dim(), right.dim())
        return _einsum_of(call, [one, other], result, [left, right])
    return _checked(call)


def _einsum(call: Call) -> Ruled:
    parts = list(call.args[1:] if isinstance(call.args[1], Tensor) else call.args[1])
    if not any(call.weight(part) for part in parts):
        return _checked(call)
    labels, result = einsum_names(call.args[0])
    return _einsum_of(call, labels, result, parts)


def _einsum_of(call: Call, labels: Sequence[str], result: str, parts: Sequence[Tensor]) -> Ruled:
    """A sum of products in which parameters are copied: their copies have the letter of the examples too."""
    pairs = list(zip(labels, parts, strict=True))
    letters = {(names[held.dim], held) for names, part in pairs if (held := call.layout(part)) is not None}
    if len(letters) != 1:
        return call.run(), Mixed(f"{call.name} pairs examples with each other", surely=True)
    ((letter, layout),) = letters
    if (layout.before, layout.after) != (1, 1) or letter not in result:
        raise Unserved(call.name)
    named, given = [], []
    for names, part in pairs:
        weight = call.weight(part)
        if call.layout(part) is None and letter in names:
            raise Unserved(f"{call.name} reads a parameter by the place of an example")
        named.append(letter + names if weight else names)
        given.append(call.watch.copies(part, weight) if weight else part)
    return torch.einsum(",".join(named) + "->" + result, *given), Layout(result.index(letter))


def _checked(call: Call) -> Ruled:
    """A function without parameters: what the layouts of its arguments say."""
    return call.run(), CHECKS[call.name](call)


def _convolution(dims: int, *, turned: bool = False) -> Rule:
    """A convolution; `turned`: a transposed one, in which inputs and output gradients change their parts."""

    def rule(call: Call) -> Ruled:
        inputs, weight, bias = (call.argument(at, name) for at, name in enumerate(("input", "weight", "bias")))
        layout = call.layout(inputs)
        if layout is None or inputs.dim() != dims + 2 or call.layout(weight) or call.layout(bias):
            raise Unserved(call.name)
        args = list(call.args)
        if dims == 2 and not turned:  # patches are then runs of memory, and pooling is several times as fast
            args[0] = inputs = _channels_last(inputs)
        outputs = call.func(*args, **call.named)
        if layout.dim != 0:
            return outputs, Mixed(f"{call.name} works along the examples", surely=True)
        held, added = call.weight(weight), call.weight(bias)
        if turned and any(extra for extra in leaves(call.argument(5, "output_padding", default=0))):
            raise Unserved(f"{call.name} with output_padding")
        geometry = _geometry(call, weight.shape[2:], dims, turned=turned)

        def terms(grads: Tensor) -> list[Term]:
            values = inputs.to(grads.dtype)
            images, others = (grads, values) if turned else (values, grads)
            rows = others.movedim(1, -1).flatten(1, -2)
            sums = grads.flatten(2).sum(2) if turned else rows.sum(1)
            found = [] if added is None else added.terms(summed(layout, sums))
            if held is None:
                return found
            if layout == FIRST and held.slot is not None:
                return [weight_term(held.slot, geometry, images, rows), *found]
            whole = summed(layout, built(geometry, images, rows))
            return [*held.terms(whole.view(*whole.shape[:2], *geometry.kernel, -1).movedim(-1, 2)), *found]

        call.note(outputs, terms, held, added)
        return outputs, layout

    return rule


def _channels_last(images: Tensor) -> Tensor:
    """Images (n, channels, height, width) with their channels last in memory, a single one too, which PyTorch takes
    for one that is first."""
    if images.shape[1] == 1:
        return images.squeeze(1).unsqueeze(3).movedim(3, 1)
    return images.contiguous(memory_format=torch.channels_last)


def summed(layout: Layout, values: Tensor) -> Tensor:
    """The sums over what belongs to one example, from (before * n * after, ...) to (n, ...)."""
    return values if layout == FIRST else layout.first(values).sum((1, 2))


def _geometry(call: Call, kernel: Sequence[int], dims: int, *, turned: bool) -> Geometry:
    def each(place: int, name: str, default: int) -> tuple[int, ...]:
        value = call.argument(place, name, default=default)
        return (value,) * dims if isinstance(value, int) else tuple(value) * (dims if len(value) == 1 else 1)

    stride, dilation = each(3, "stride", 1), each(7 if turned else 5, "dilation", 1)
    groups: int = call.argument(6, "groups", default=1)
    padding = call.argument(4, "padding", default=0)
    if isinstance(padding, str):
        total = [dil * (size - 1) if padding == "same" else 0 for dil, size in zip(dilation, kernel, strict=True)]
        sides = tuple((each // 2, each - each // 2) for each in total)
    else:
        sides = tuple((side, side) for side in each(4, "padding", 0))
    return Geometry(tuple(kernel), stride, dilation, sides, groups)


def looked_up(weight: Weight, ids: Tensor, padding: int) -> Weight:
    """Rows of a table by constant numbers, the same for every example."""
    slot = weight.slot
    assert slot is not None
    return Weight(None, lambda g: [_lookup(slot, ids.expand(len(g), *ids.shape), g, padding)], weight.roots)


def _lookup(slot: Slot, ids: Tensor, grads: Tensor, padding: int) -> Term:
    places = ids.long().reshape(len(ids), -1)
    rows = grads.reshape(*places.shape, grads.shape[-1])
    return Lookup(slot, places, rows if padding < 0 else rows.masked_fill((places == padding).unsqueeze(2), 0))


def _embedding(call: Call) -> Ruled:
    weight, ids = call.argument(0, "weight"), call.argument(1, "input")
    padding = call.argument(2, "padding_idx", default=-1)
    layout, held = call.layout(ids), call.weight(weight)
    if layout is None or call.layout(weight) or (held is not None and held.slot is None):
        raise Unserved("embedding in a table that is computed")
    outputs = call.run()
    if held is not None and held.slot is not None:
        slot = held.slot
        call.note(outputs, lambda g: [_lookup(slot, layout.first(ids), layout.first(g), padding)], held)
    return outputs, layout


def _embedding_bag(call: Call) -> Ruled:
    ids, weight, padding = call.args[0], call.args[1], call.named.get("padding_idx")
    mode, layout, held = call.named.get("mode", "mean"), call.layout(ids), call.weight(weight)
    given = call.named.get("per_sample_weights"), call.named.get("offsets")
    if layout != FIRST or ids.dim() != 2 or mode not in ("sum", "mean") or any(each is not None for each in given):
        raise Unserved("embedding_bag of bags that are not the rows of a matrix")
    outputs = call.run()
    if held is not None:
        slot = held.slot
        if slot is None:
            raise Unserved("embedding_bag in a table that is computed")

        def terms(grads: Tensor) -> list[Term]:
            shares = torch.ones_like(ids, dtype=grads.dtype) if padding is None else (ids != padding).to(grads)
            if mode == "mean":
                shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
            return [Lookup(slot, ids.long(), shares.unsqueeze(2) * grads.unsqueeze(1))]

        call.note(outputs, terms, held)
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


def with_copies(call: Call) -> Call:
    """An call on elements, or attention, with copies in place of its parameters, beside the examples' layout.

    Raises:
      Unserved: another call, or a parameter that has as many rows as there are examples.
    """
    wide, watch = max(value.dim() for value in call.tensors), call.watch
    layouts = {held.at(held.dim + wide - value.dim()) for value in call.tensors if (held := call.layout(value))}
    if call.name not in (*ELEMENTWISE, "scaled_dot_product_attention") or len(layouts) != 1:
        raise Unserved(f"{call.name} of a parameter{place()}")
    (layout,) = layouts

    def beside(value: Any) -> Any:
        weight = call.weight(value)
        if weight is None:
            return value
        spot = layout.dim - wide + value.dim()  # where the examples would be in the parameter
        if spot >= 0 and value.shape[spot] != 1:
            raise Unserved(f"{call.name} of a parameter by the place of an example{place()}")
        spread, dim = watch.copies(value, weight, place=spot), max(spot, 0)
        if (layout.before, layout.after) != (1, 1):
            spread = torch.cat([spread.repeat_interleave(layout.after, dim)] * layout.before, dim)
        return watch.give(spread, layout.at(layout.dim - wide + spread.dim()))

    named = {key: beside(value) for key, value in call.named.items()}
    return Call(watch, call.func, call.name, tuple(map(beside, call.args)), named)


def derived(value: Tensor, call: Call) -> Weight:
    """A value that follows from parameters alone: its gradients are led back to them, example by example."""
    weights = [tag for tag in call.tags if isinstance(tag, Weight)]
    roots = list({id(root): root for weight in weights for root in weight.roots}.values())
    tags = [call.watch.tag(root) for root in roots]
    if call.name == "embedding" and weights[0].slot is not None:
        return looked_up(weights[0], call.args[1], call.argument(2, "padding_idx", default=-1))

    def terms(grads: Tensor) -> list[Term]:
        found = torch.autograd.grad(
            value,
            roots,
            grads.to(value.dtype),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return [term for own, part in zip(tags, found, strict=True) for term in own.terms(part.to(grads.dtype))]

    return Weight(None, terms, tuple(roots))


ELEMENTWISE = {name for name, check in CHECKS.items() if check is CHECKS["add"]}
