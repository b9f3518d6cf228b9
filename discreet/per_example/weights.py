"""Functions of PyTorch that read trainable parameters, each with the parameter's part of the gradient of each example.

A function with a rule runs as PyTorch runs it, and notes on the tape where its output gradients will appear and what
terms follow from them. A parameter that is used in another way (added, scaled, in an einsum) is copied for each
example, and the gradients of the copies are built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.per_example.calls import Call, Rule, Ruled, Weight
from discreet.per_example.convolution import CONVOLUTION_RULES
from discreet.per_example.layouts import FIRST, Count, Layout, Mixed, Unserved, leaves, place
from discreet.per_example.operations import CHECKS, einsum_names, matrix_names
from discreet.per_example.terms import Lookup, Outer, Pair, Slot, Term

Gather = Callable[[Tensor], Tensor]


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
        given.append(copies(call, part, weight) if weight else part)
    return torch.einsum(",".join(named) + "->" + result, *given), Layout(result.index(letter))


def _checked(call: Call) -> Ruled:
    """A function without parameters: what the layouts of its arguments say."""
    return call.run(), CHECKS[call.name](call)


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


def _scaled(call: Call, outputs: Tensor, scales: Sequence[Any], normal: Callable[[], Tensor], gather: Gather) -> Ruled:
    """Notes outputs = normal * weight + bias. `gather`: sums the positions at which an example uses an entry."""
    held, added = map(call.weight, scales)

    def terms(grads: Tensor) -> list[Term]:
        found = [] if held is None else held.terms(gather(grads * normal()))
        return found if added is None else [*found, *added.terms(gather(grads))]

    call.note(outputs, terms, held, added)
    return outputs, call.layout(call.argument(0, "input"))


def _layer_norm(call: Call) -> Ruled:
    inputs, shape, weight = (call.argument(at, name) for at, name in enumerate(("input", "shape", "weight")))
    whole, layout, dims = call.name == "layer_norm", call.layout(inputs), len(list(shape))
    bias, eps = (call.argument(3, "bias"), call.argument(4, "eps", default=1e-5)) if whole else (None, 0.0)
    if layout is None or call.layout(weight):
        raise Unserved(call.name)
    if layout.dim >= inputs.dim() - dims or (call.weight(weight) is None and call.weight(bias) is None):
        return _checked(call)
    if whole:
        normal = functional.layer_norm(inputs, list(shape), eps=eps)
    else:
        normal = functional.rms_norm(inputs, list(shape), eps=call.argument(3, "eps"))
    outputs = normal
    if weight is not None:  # by itself: the gradient needs what comes before
        outputs = normal * weight if bias is None else torch.addcmul(bias, normal, weight)

    def gather(values: Tensor) -> Tensor:
        values = layout.first(values)
        positions = tuple(range(1, values.dim() - dims))
        return values.sum(positions) if positions else values

    return _scaled(call, outputs, (weight, bias), lambda: normal, gather)


def _channels(values: Tensor) -> Tensor:
    """(N, channels, space...) -> (N, channels)."""
    return values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values


def _group_norm(call: Call) -> Ruled:
    """The gradient of the weight follows from sums over space, as in PyTorch's own backward pass, without normalising
    a second time."""
    inputs, groups, weight, bias = (
        call.argument(at, name) for at, name in enumerate(("input", "num_groups", "weight", "bias"))
    )
    layout = call.layout(inputs)
    if layout is None or layout.dim != 0 or call.layout(weight):
        raise Unserved(call.name)
    count, channels = inputs.shape[:2]
    last = inputs.dim() == 4 and not inputs.is_cuda and inputs.is_contiguous(memory_format=torch.channels_last)
    inputs = inputs if last else inputs.contiguous()
    positions, eps = inputs[0, 0].numel(), call.argument(4, "eps", default=1e-5)
    outputs, mean, scale = torch.native_group_norm(inputs, weight, bias, count, channels, positions, groups, eps)
    held, added = call.weight(weight), call.weight(bias)

    def terms(grads: Tensor) -> list[Term]:
        sums = _channels(grads)
        found = [] if added is None else added.terms(layout.summed(sums))
        if held is None:
            return found
        products, shifts = (value.view(count, groups, -1) for value in (_channels(grads * inputs), sums))
        rows = ((products - shifts * mean.unsqueeze(2)) * scale.unsqueeze(2)).view(count, channels)
        return [*held.terms(layout.summed(rows)), *found]

    call.note(outputs, terms, held, added)
    return outputs, layout


def _channel_norm(call: Call) -> Ruled:
    """InstanceNorm; and BatchNorm in eval mode, which scales each channel by numbers that no example changes."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training")
    inputs, weight, bias, mean, variance, training = (call.argument(at, name) for at, name in enumerate(names))
    eps, batch, layout = call.argument(7, "eps"), call.name == "batch_norm", call.layout(inputs)
    if layout is None or layout.dim != 0 or call.layout(weight):
        raise Unserved(call.name)
    if training and (batch or mean is not None):
        return call.run(), Mixed(f"{call.name} in training mode", surely=True)
    run: Any = functional.batch_norm if batch else partial(functional.instance_norm, use_input_stats=training)

    def normal() -> Tensor:
        return run(inputs, mean, variance, eps=eps)  # type: ignore[no-any-return]

    return _scaled(call, call.run(), (weight, bias), normal, lambda values: layout.summed(_channels(values)))


def _prelu(call: Call) -> Ruled:
    inputs, weight = call.args
    shape = [1] * (inputs.dim() - 1) if weight.numel() == 1 else [-1, *[1] * (inputs.dim() - 2)]
    return call.watched(lambda: torch.where(inputs > 0, inputs, inputs * weight.view(shape)))


WEIGHT_RULES: dict[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
    **CONVOLUTION_RULES,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "group_norm": _group_norm,
    **dict.fromkeys(("batch_norm", "instance_norm"), _channel_norm),
    "prelu": _prelu,
}


def copies(call: Call, value: Tensor, weight: Weight, *, place: int = -1) -> Tensor:
    """A copy of a parameter for each example, whose gradients are those of the parameter by example.

    `place`: of the examples among the dimensions of the value, which has size 1 there; or before them if it is
    negative: -1 directly, -2 with a dimension of size 1 between, and so on.
    """
    one = value.squeeze(place) if place >= 0 else value
    found = one.detach().expand(call.count, *one.shape).requires_grad_()
    call.watch.note(found, lambda grads: weight.terms(grads.reshape(len(grads), *value.shape)))
    ones = [1] * (-place - 1)
    return found.movedim(0, place) if place >= 0 else found.reshape(call.count, *ones, *one.shape)


def repeated_for_each(call: Call) -> Ruled:
    """A constant or a parameter that is repeated for each example."""
    value, tag, sizes = call.tensors[0], call.tags[0], list(leaves(call.args[1:]))
    counts = [spot for spot, size in enumerate(sizes) if isinstance(size, Count) and size.times == 1]
    spot, more = (counts or [-1])[0], len(sizes) - value.dim()
    if len(counts) != 1 or call.named or (spot >= more and value.shape[spot - more] != 1):
        raise Unserved(f"{call.name} counts examples{place()}")
    if isinstance(tag, Weight):
        value = copies(call, value, tag, place=spot - more)
        sizes[spot] = 1 if call.name in ("repeat", "tile") else call.count
    return getattr(value, call.name)(*sizes), Layout(spot)


def with_copies(call: Call) -> Call:
    """A call on elements, or attention, with copies in place of its parameters, beside the examples' layout.

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
        spread, dim = copies(call, value, weight, place=spot), max(spot, 0)
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
    if call.name == "embedding" and (slot := weights[0].slot) is not None:  # rows by constant numbers
        ids, padding = call.args[1], call.argument(2, "padding_idx", default=-1)
        return Weight(None, lambda g: [_lookup(slot, ids.expand(len(g), *ids.shape), g, padding)], tuple(roots))

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
