"""Normalisation within an example, or by statistics that stay, and PReLU: scales that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.per_example.calls import Call
from discreet.per_example.layouts import Mixed, Unserved
from discreet.per_example.terms import Term
from discreet.per_example.weights import Rule, Ruled, summed

Gather = Callable[[Tensor], Tensor]


def _scaled(call: Call, outputs: Tensor, scales: tuple[Any, Any], normal: Callable[[], Tensor], gather: Gather) -> None:
    """Notes outputs = normal() * weight + bias. `gather`: sums the positions at which an example uses an entry."""
    held, added = map(call.weight, scales)

    def terms(grads: Tensor) -> list[Term]:
        found = [] if held is None else held.terms(gather(grads * normal()))
        return found if added is None else [*found, *added.terms(gather(grads))]

    call.note(outputs, terms, held, added)


def _layer_norm(call: Call) -> Ruled:
    inputs, shape, weight = (call.argument(at, name) for at, name in enumerate(("input", "shape", "weight")))
    whole = call.name == "layer_norm"
    bias, eps = (call.argument(3, "bias"), call.argument(4, "eps", default=1e-5)) if whole else (None, 0.0)
    layout, dims = call.layout(inputs), len(list(shape))
    if layout is None or call.layout(weight):
        raise Unserved(call.name)
    if layout.dim >= inputs.dim() - dims:
        return call.run(), Mixed(f"{call.name} works along the examples", surely=True)
    if call.weight(weight) is None and call.weight(bias) is None:
        return call.run(), layout
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

    _scaled(call, outputs, (weight, bias), lambda: normal, gather)
    return outputs, layout


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
        found = [] if added is None else added.terms(summed(layout, sums))
        if held is None:
            return found
        products, shifts = (value.view(count, groups, -1) for value in (_channels(grads * inputs), sums))
        rows = ((products - shifts * mean.unsqueeze(2)) * scale.unsqueeze(2)).view(count, channels)
        return [*held.terms(summed(layout, rows)), *found]

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
    run = functional.batch_norm if batch else functional.instance_norm

    def normal() -> Tensor:
        more = {} if batch else {"use_input_stats": training}
        return run(inputs, mean, variance, eps=eps, **more)

    outputs = call.run()
    _scaled(call, outputs, (weight, bias), normal, lambda values: summed(layout, _channels(values)))
    return outputs, layout


def _prelu(call: Call) -> Ruled:
    inputs, weight = call.args
    layout, held = call.layout(inputs), call.weight(weight)
    if layout is None or call.layout(weight):
        raise Unserved("prelu")
    single, count = weight.numel() == 1, call.count
    outputs = call.run()
    if not single and layout.dim != 0:
        return outputs, Mixed("prelu works along the examples", surely=True)

    def terms(grads: Tensor) -> list[Term]:
        assert held is not None
        values = grads * inputs.clamp(max=0)
        if single:
            return held.terms(layout.first(values).reshape(count, -1).sum(1, keepdim=True))
        return held.terms(summed(layout, _channels(values)))

    call.note(outputs, terms, held)
    return outputs, layout


NORM_RULES: dict[str, Rule] = {
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    "group_norm": _group_norm,
    **dict.fromkeys(("batch_norm", "instance_norm"), _channel_norm),
    "prelu": _prelu,
}
