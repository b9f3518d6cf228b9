"""Layers over sequences: an LSTM of plain operations, layers that follow it, and Transformer layers.

torch.nn.LSTM calls fused kernels for which torch.func.vmap has no rule (pytorch issue 105982). The gates of the same
recurrence in plain operations are matrix products over time, for which there is a rule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.per_example.layer_rules import layer_norm, without_parameters
from discreet.per_example.linear import affine, linear, product_terms
from discreet.per_example.terms import Rule, Tape, unchanged


class LSTMLayer(nn.Module):
    """One LSTM layer, (n, steps, width) to (n, steps, hidden), starting from zeros.

    Equal to torch.nn.LSTM with batch_first and one layer, except that there is one bias and not the sum of
    two. Gates are in its order: input, forget, cell, output. steps is at least 1.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(hidden)
        self.input_weight = nn.Parameter(torch.empty(4 * hidden, width).uniform_(-bound, bound))
        self.hidden_weight = nn.Parameter(torch.empty(4 * hidden, hidden).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(4 * hidden).uniform_(-bound, bound))

    def forward(self, inputs: Tensor) -> Tensor:
        gates = functional.linear(inputs, self.input_weight, self.bias)
        return self.unrolled(gates, torch.zeros_like(gates))[0]

    def unrolled(self, gates: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states after and before each step, both (n, steps, hidden).

        Args:
          gates: what the inputs and the bias contribute, (n, steps, 4 * hidden).
          added: zeros of the same shape, added to what the hidden state contributes: gradients there are those of the
            products with the hidden weight.
        """
        hidden = cell = gates.new_zeros(len(gates), self.hidden_weight.shape[1])
        before, after = [], []
        for step, zero in zip(gates.unbind(1), added.unbind(1), strict=True):
            before.append(hidden)
            product = functional.linear(hidden, self.hidden_weight) + zero
            enter, forget, candidate, leave = (step + product).chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            after.append(hidden)
        return torch.stack(after, dim=1), torch.stack(before, dim=1)


class LastStep(nn.Module):
    """The last step of a sequence: (n, steps, width) to (n, width)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, -1]


class ClassesSecond(nn.Module):
    """(n, steps, classes) to (n, classes, steps), as losses of torch.nn take sequences."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.transpose(1, 2)


def lstm(tape: Tape, layer: LSTMLayer, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=3, most=3)
    gates = affine(tape, inputs, layer.input_weight, layer.bias)
    added = torch.zeros_like(gates, requires_grad=True)
    after, before = layer.unrolled(gates, added)
    slot = tape.slot(layer.hidden_weight)
    if slot is not None:
        tape.add(added, lambda grads: product_terms(slot, None, before, grads, tape.order))
    return after


def covers_encoder(layer: nn.TransformerEncoderLayer) -> bool:
    """True if the layer is made of the parts that PyTorch makes it of, with examples first."""
    kinds = (nn.MultiheadAttention, nn.Linear, nn.Linear, nn.LayerNorm, nn.LayerNorm, *[nn.Dropout] * 3)
    norms, chances = (layer.norm1, layer.norm2), (layer.dropout, layer.dropout1, layer.dropout2)
    parts = (layer.self_attn, layer.linear1, layer.linear2, *norms, *chances)
    plain = all(type(part) is kind for part, kind in zip(parts, kinds, strict=True))
    return plain and bool(layer.self_attn.batch_first) and all(map(unchanged, layer.modules()))


def transformer_encoder_layer(tape: Tape, layer: nn.TransformerEncoderLayer, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=3, most=3)
    if layer.norm_first:
        inner = inputs + _attended(tape, layer, layer_norm(tape, layer.norm1, inputs))
        return inner + _fed_forward(tape, layer, layer_norm(tape, layer.norm2, inner))
    inner = layer_norm(tape, layer.norm1, inputs + _attended(tape, layer, inputs))
    return layer_norm(tape, layer.norm2, inner + _fed_forward(tape, layer, inner))


def _attended(tape: Tape, encoder: nn.TransformerEncoderLayer, inputs: Tensor) -> Tensor:
    layer = encoder.self_attn
    projected = affine(tape, inputs, layer.in_proj_weight, layer.in_proj_bias)
    split = (*inputs.shape[:2], layer.num_heads, -1)
    query, key, value = (part.reshape(split).transpose(1, 2) for part in projected.chunk(3, 2))
    chance = layer.dropout if layer.training else 0.0
    mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=chance).transpose(1, 2).flatten(2)
    outputs: Tensor = encoder.dropout1(affine(tape, mixed, layer.out_proj.weight, layer.out_proj.bias))
    return outputs


def _fed_forward(tape: Tape, layer: nn.TransformerEncoderLayer, inputs: Tensor) -> Tensor:
    inner: Tensor = layer.dropout(layer.activation(linear(tape, layer.linear1, inputs)))
    outputs: Tensor = layer.dropout2(linear(tape, layer.linear2, inner))
    return outputs


SEQUENCE_RULES: dict[type[nn.Module], Rule] = {
    LSTMLayer: lstm,
    nn.TransformerEncoderLayer: transformer_encoder_layer,
    LastStep: without_parameters,
    ClassesSecond: without_parameters,
}
