"""Rules for layers that work on each example by itself: activations, dropout, pools and shapes, embeddings, PReLU, and
normalisation within an example or by statistics that stay.

A layer that reads channels or space takes an input without the examples as well. So that the first dimension is never
one that it works on, it needs one dimension more than it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from discreet.per_example.terms import Lookup, Rows, Rule, Tape, Term

_ANY: Sequence[type[nn.Module]] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Threshold, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink),
    *(nn.Dropout, nn.AlphaDropout, nn.Identity, nn.Flatten, nn.Unflatten),
)
# By the number of dimensions that their inputs have at least, the examples counted.
_SPATIAL: Mapping[int, Sequence[type[nn.Module]]] = {
    2: (
        *(nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.Dropout1d),
        *(nn.ZeroPad1d, nn.ConstantPad1d, nn.CircularPad1d, nn.ReflectionPad1d, nn.ReplicationPad1d),
        nn.FeatureAlphaDropout,
    ),
    3: (
        *(nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout2d),
        *(nn.ZeroPad2d, nn.ConstantPad2d, nn.CircularPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d),
        *(nn.FractionalMaxPool2d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
        *(nn.Fold, nn.LocalResponseNorm, nn.ChannelShuffle),
    ),
    4: (
        *(nn.MaxPool3d, nn.AvgPool3d, nn.LPPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d, nn.Dropout3d),
        *(nn.ZeroPad3d, nn.ConstantPad3d, nn.CircularPad3d, nn.ReflectionPad3d, nn.ReplicationPad3d),
        *(nn.FractionalMaxPool3d, nn.Unfold, nn.PixelShuffle, nn.PixelUnshuffle, nn.Softmax2d),
    ),
}
_ALONG: Sequence[type[nn.Module]] = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)


def covers_dimension(layer: nn.Module) -> bool:
    """True if a layer along one dimension names it, and it is not that of the examples."""
    return layer.dim not in (None, 0)


def check_layers(model: nn.Module) -> None:
    """Raises ValueError if a layer mixes examples."""
    for name, layer in model.named_modules():
        check_layer(layer, name)


def check_layer(layer: nn.Module, name: str = "") -> None:
    """ValueError for statistics of the batch, or that change with it; for a table of embeddings that a pass changes, or
    whose gradients count rows over a batch; and if the values of an example decide how many numbers are drawn."""
    kind = type(layer).__name__
    named = f"layer {name!r} ({kind})" if name else kind
    running = getattr(layer, "running_mean", None) is not None
    if isinstance(layer, _NormBase) and (layer.training if running else isinstance(layer, _BatchNorm)):
        raise ValueError(
            f"{named} mixes examples: use GroupNorm instead (discreet.to_group_norm makes it)"
            + (", or put the layer in eval mode, so that its statistics stay as they are" if running else "")
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        raise ValueError("an embedding with max_norm or scale_grad_by_freq mixes examples: switch both off")
    if isinstance(layer, nn.RReLU) and layer.training:
        raise ValueError(f"{named} draws a number for each value below 0: use LeakyReLU or PReLU")


def _free(least: int) -> Rule:
    def run(tape: Tape, layer: nn.Module, inputs: Tensor) -> Tensor:
        tape.rows(inputs, least=least)
        outputs: Tensor = layer(inputs)
        tape.rows(outputs, least=1)
        return outputs

    return run


def _along(tape: Tape, layer: nn.Module, inputs: Tensor) -> Tensor:
    dim = cast(int, layer.dim)
    tape.rows(inputs, least=1 + (dim if dim > 0 else -dim))
    outputs: Tensor = layer(inputs)
    return outputs


without_parameters: Rule = _free(1)


def embedding(tape: Tape, layer: nn.Embedding, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=1)
    check_layer(layer)
    padding, slot = layer.padding_idx, tape.slot(layer.weight)
    outputs = functional.embedding(inputs, layer.weight, padding)
    if slot is not None:

        def terms(grads: Tensor) -> list[Term]:
            ids = inputs.long().reshape(len(inputs), -1)
            rows = grads.reshape(*ids.shape, grads.shape[-1])
            return [Lookup(slot, ids, rows if padding is None else rows.masked_fill((ids == padding).unsqueeze(2), 0))]

        tape.add(outputs, terms)
    return outputs


def embedding_bag(tape: Tape, layer: nn.EmbeddingBag, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=2, most=2)
    check_layer(layer)
    padding, slot = layer.padding_idx, tape.slot(layer.weight)
    outputs = functional.embedding_bag(inputs, layer.weight, mode=layer.mode, padding_idx=padding)
    if slot is not None:

        def terms(grads: Tensor) -> list[Term]:
            shares = torch.ones_like(inputs, dtype=grads.dtype) if padding is None else (inputs != padding).to(grads)
            if layer.mode == "mean":
                shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
            return [Lookup(slot, inputs.long(), shares.unsqueeze(2) * grads.unsqueeze(1))]

        tape.add(outputs, terms)
    return outputs


def covers_bag(layer: nn.EmbeddingBag) -> bool:
    return layer.mode in ("sum", "mean")


def prelu(tape: Tape, layer: nn.PReLU, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=1 if layer.num_parameters == 1 else 2)
    outputs, slot = functional.prelu(inputs, layer.weight), tape.slot(layer.weight)
    if slot is not None:
        by_channel = (len(inputs), layer.num_parameters, -1)
        tape.add(outputs, lambda grads: [Rows(slot, (grads * inputs.clamp(max=0)).reshape(by_channel).sum(2))])
    return outputs


Gather = Callable[[Tensor], Tensor]  # sums the positions at which an example uses an entry of the weight


def _note(tape: Tape, layer: nn.Module, outputs: Tensor, normal: Callable[[], Tensor], gather: Gather) -> Tensor:
    """Notes outputs = normal() * weight + bias on the tape; the layer may have either or none."""
    weight, bias = (tape.slot(getattr(layer, name, None)) for name in ("weight", "bias"))

    def terms(grads: Tensor) -> list[Term]:
        found: list[Term] = [] if weight is None else [Rows(weight, gather(grads * normal()))]
        return found if bias is None else [*found, Rows(bias, gather(grads))]

    if weight or bias:
        tape.add(outputs, terms)
    return outputs


def _last(dims: int) -> Gather:
    """Sums over all dimensions but the first and the last few: (n, positions..., shape...) -> (n, shape...)."""

    def gather(values: Tensor) -> Tensor:
        positions = tuple(range(1, values.dim() - dims))
        return values.sum(positions) if positions else values

    return gather


def _channels(values: Tensor) -> Tensor:
    """(n, channels, space...) -> (n, channels)."""
    return values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values


def layer_norm(tape: Tape, layer: nn.LayerNorm | nn.RMSNorm, inputs: Tensor) -> Tensor:
    shape, bias = list(layer.normalized_shape), getattr(layer, "bias", None)
    tape.rows(inputs, least=len(shape) + 1)
    run: Callable[..., Tensor] = functional.layer_norm if isinstance(layer, nn.LayerNorm) else functional.rms_norm
    outputs = normal = run(inputs, shape, eps=layer.eps)
    if layer.weight is not None:  # by itself: the gradient needs what comes before
        outputs = normal * layer.weight if bias is None else torch.addcmul(bias, normal, layer.weight)
    return _note(tape, layer, outputs, lambda: normal, _last(len(shape)))


def group_norm(tape: Tape, layer: nn.GroupNorm, inputs: Tensor) -> Tensor:
    """The gradient of the weight follows from sums over space, as in PyTorch's own backward pass, without normalising
    a second time."""
    tape.rows(inputs, least=2)
    count, channels, groups = *inputs.shape[:2], layer.num_groups
    last = inputs.dim() == 4 and not inputs.is_cuda and inputs.is_contiguous(memory_format=torch.channels_last)
    inputs = inputs if last else inputs.contiguous()
    positions = inputs[0, 0].numel()
    outputs, mean, scale = torch.native_group_norm(
        inputs, layer.weight, layer.bias, count, channels, positions, groups, layer.eps
    )
    weight, bias = tape.slot(layer.weight), tape.slot(layer.bias)

    def terms(grads: Tensor) -> list[Term]:
        sums = _channels(grads)
        found: list[Term] = [] if bias is None else [Rows(bias, sums)]
        if weight is None:
            return found
        products, shifts = (value.view(count, groups, -1) for value in (_channels(grads * inputs), sums))
        rows = (products - shifts * mean.unsqueeze(2)) * scale.unsqueeze(2)
        return [Rows(weight, rows.view(count, channels)), *found]

    if weight or bias:
        tape.add(outputs, terms)
    return outputs


def channel_norm(tape: Tape, layer: _NormBase, inputs: Tensor) -> Tensor:
    """InstanceNorm; and BatchNorm in eval mode, which scales each channel by numbers that no example changes."""
    check_layer(layer)
    batch, mean, variance = isinstance(layer, _BatchNorm), layer.running_mean, layer.running_var
    tape.rows(inputs, least=2 if batch else 3)

    def normal(weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if batch:
            return functional.batch_norm(inputs, mean, variance, weight, bias, eps=layer.eps)
        return functional.instance_norm(inputs, mean, variance, weight, bias, mean is None, eps=layer.eps)

    return _note(tape, layer, normal(layer.weight, layer.bias), normal, _channels)


LAYER_RULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys(_ANY, without_parameters),
    **{kind: _free(least) for least, kinds in _SPATIAL.items() for kind in kinds},
    **dict.fromkeys(_ALONG, _along),
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.PReLU: prelu,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), layer_norm),
    nn.GroupNorm: group_norm,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), channel_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), channel_norm),
}
