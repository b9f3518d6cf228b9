"""Linear layers, embeddings, layers without parameters, and perceptrons: Linear with ReLU or tanh, by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.privacy.rules.objective import logit_gradients
from discreet.privacy.rules.terms import Bag, Lookup, Outer, Pair, Rows, Rule, Slot, Tape, Term


def product_terms(weight: Slot | None, bias: Slot | None, inputs: Tensor, grads: Tensor, order: int) -> list[Term]:
    """Terms for outputs = inputs @ weight.T + bias; inputs (n, ..., d), grads (n, ..., p)."""
    if grads.dim() == 2:
        return [Pair(weight, bias, inputs, grads)]
    grads = grads.flatten(1, -2)
    terms: list[Term] = [] if weight is None else [Outer(weight, inputs.flatten(1, -2), grads).cheapest(order)]
    return terms if bias is None else [*terms, Rows(bias, grads.sum(1))]


def affine(tape: Tape, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs @ weight.T + bias, noted on the tape."""
    tape.rows(inputs, least=2)
    outputs = functional.linear(inputs, weight, bias)
    weight_slot, bias_slot = tape.slot(weight), tape.slot(bias)
    if weight_slot or bias_slot:
        tape.add(outputs, lambda grads: product_terms(weight_slot, bias_slot, inputs, grads, tape.order))
    return outputs


def linear(tape: Tape, layer: nn.Linear, inputs: Tensor) -> Tensor:
    return affine(tape, inputs, layer.weight, layer.bias)


def embedding(tape: Tape, layer: nn.Embedding, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=1)
    check_table(layer)
    outputs = functional.embedding(inputs, layer.weight, layer.padding_idx)
    slot = tape.slot(layer.weight)
    if slot is not None:
        tape.add(outputs, lambda grads: [_lookup(slot, inputs.long(), grads, layer.padding_idx)])
    return outputs


def check_table(layer: nn.Module) -> None:
    """ValueError for a table of embeddings that a pass changes, or whose gradients count rows over a batch."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        raise ValueError("an embedding with max_norm or scale_grad_by_freq mixes examples: switch both off")


def _lookup(slot: Slot, ids: Tensor, grads: Tensor, padding_idx: int | None) -> Term:
    ids, grads = ids.reshape(len(ids), -1), grads.reshape(len(ids), -1, grads.shape[-1])
    if padding_idx is not None:
        grads = grads.masked_fill((ids == padding_idx).unsqueeze(2), 0)
    return Lookup(slot, ids, grads)


def embedding_bag(tape: Tape, layer: nn.EmbeddingBag, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=2, most=2)
    check_table(layer)
    weight, padding, mode = layer.weight, layer.padding_idx, layer.mode
    outputs = functional.embedding_bag(inputs, weight, mode=mode, padding_idx=padding)
    slot = tape.slot(weight)
    if slot is not None:
        tape.add(outputs, lambda grads: [Bag(slot, inputs.long(), _shares(layer, inputs, grads), grads)])
    return outputs


def _shares(layer: nn.EmbeddingBag, ids: Tensor, grads: Tensor) -> Tensor:
    """The share of each place's row in the bag, (n, T), in the gradients' type."""
    counted = torch.ones_like(ids) if layer.padding_idx is None else ids != layer.padding_idx
    shares = counted.to(grads.dtype)
    return shares / shares.sum(1, keepdim=True).clamp(min=1) if layer.mode == "mean" else shares


def covers_bag(layer: nn.EmbeddingBag) -> bool:
    return layer.mode in ("sum", "mean")


def prelu(tape: Tape, layer: nn.PReLU, inputs: Tensor) -> Tensor:
    shared = layer.num_parameters == 1
    tape.rows(inputs, least=1 if shared else 2)
    outputs, slot = functional.prelu(inputs, layer.weight), tape.slot(layer.weight)

    if slot is not None:
        width = 1 if shared else inputs.shape[1]
        tape.add(outputs, lambda grads: [Rows(slot, _by_channel(grads * inputs.clamp(max=0), width))])
    return outputs


def _by_channel(values: Tensor, width: int) -> Tensor:
    """(n, ...) -> (n, width): the sums over what an example has of each channel, or over everything if width is 1."""
    return values.reshape(len(values), width, -1).sum(2)


LINEAR_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.PReLU: prelu,
}

# Perceptrons by hand: on such small models autograd costs as much as the products do. Without it a clipped sum takes a
# fifth less time (benchmarks/per_example_speed.py), and the terms are the same.
Back = Callable[[nn.Module, Tensor, Tensor], Tensor]  # from the layer, its outputs and the gradients there

# Autograd's own: a product with a mask takes eight times as long.
_relu_backward = torch.ops.aten.threshold_backward.default

_BACKWARD: dict[type[nn.Module], Back] = {
    nn.Linear: lambda layer, outputs, grads: grads @ layer.weight,  # type: ignore[operator]
    nn.ReLU: lambda layer, outputs, grads: _relu_backward(grads, outputs, 0),
    nn.Tanh: lambda layer, outputs, grads: torch.addcmul(grads, grads * outputs, outputs, value=-1),
}


def is_perceptron(layers: Sequence[nn.Module], inputs: Tensor) -> bool:
    """True if the layers are Linear, ReLU and Tanh on rows (n, d), behind an nn.Flatten() if there is one."""
    flat = bool(layers) and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1)
    inner = layers[1:] if flat else layers
    return (flat or inputs.dim() == 2) and all(type(layer) in _BACKWARD for layer in inner)


def perceptron_terms(
    layers: Sequence[nn.Module], inputs: Tensor, targets: Tensor, *, slots: Mapping[int, Slot]
) -> list[Term]:
    """Terms of all linear layers, first layer first, for the cross-entropy. Gradients must be switched off."""
    values = [inputs]
    for layer in layers:
        values.append(layer(values[-1]))
    grads = logit_gradients(values[-1], targets)
    first = next((index for index, layer in enumerate(layers) if type(layer) is nn.Linear), len(layers))
    terms: list[Term] = []
    for index in range(len(layers) - 1, first - 1, -1):
        layer = layers[index]
        if type(layer) is nn.Linear:
            weight, bias = slots.get(id(layer.weight)), slots.get(id(layer.bias))
            if weight or bias:
                terms.append(Pair(weight, bias, values[index], grads))
        if index > first:
            grads = _BACKWARD[type(layer)](layer, values[index + 1], grads)
    return terms[::-1]
