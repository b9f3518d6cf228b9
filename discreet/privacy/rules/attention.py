"""Transformer layers: self-attention and a feed-forward part, each with a normalisation (Vaswani et al. 2017)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from discreet.privacy.rules.linear import affine, linear
from discreet.privacy.rules.normalisation import layer_norm
from discreet.privacy.rules.terms import Rule, Tape, unchanged


def covers(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether the layer is made of the parts that PyTorch makes it of, with examples first."""
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


def _attended(tape: Tape, layer: nn.TransformerEncoderLayer, inputs: Tensor) -> Tensor:
    outputs: Tensor = layer.dropout1(self_attention(tape, layer.self_attn, inputs))
    return outputs


def self_attention(tape: Tape, layer: nn.MultiheadAttention, inputs: Tensor) -> Tensor:
    projected = affine(tape, inputs, layer.in_proj_weight, layer.in_proj_bias)
    split = (*inputs.shape[:2], layer.num_heads, -1)
    query, key, value = (part.reshape(split).transpose(1, 2) for part in projected.chunk(3, 2))
    chance = layer.dropout if layer.training else 0.0
    attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=chance)
    return affine(tape, attended.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)


def _fed_forward(tape: Tape, layer: nn.TransformerEncoderLayer, inputs: Tensor) -> Tensor:
    inner: Tensor = layer.dropout(layer.activation(linear(tape, layer.linear1, inputs)))
    outputs: Tensor = layer.dropout2(linear(tape, layer.linear2, inner))
    return outputs


ATTENTION_RULES: dict[type[nn.Module], Rule] = {nn.TransformerEncoderLayer: transformer_encoder_layer}
