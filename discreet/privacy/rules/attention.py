"""Transformer layers: self-attention and a feed-forward part, each with a normalisation (Vaswani et al. 2017)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from discreet.privacy.rules.linear import affine, linear
from discreet.privacy.rules.normalisation import layer_norm
from discreet.privacy.rules.terms import Rule, Tape, unchanged


def covers(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether the layer is made of the parts that PyTorch makes it of, with examples first and without dropout."""
    attention = layer.self_attn
    chances = (attention.dropout, layer.dropout.p, layer.dropout1.p, layer.dropout2.p)
    quiet = not (layer.training and any(chances))
    kinds = (nn.MultiheadAttention, nn.Linear, nn.Linear, nn.LayerNorm, nn.LayerNorm)
    parts = (attention, layer.linear1, layer.linear2, layer.norm1, layer.norm2)
    plain = all(type(part) is kind for part, kind in zip(parts, kinds, strict=True))
    return plain and quiet and bool(attention.batch_first) and all(map(unchanged, layer.modules()))


def transformer_encoder_layer(tape: Tape, layer: nn.TransformerEncoderLayer, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=3, most=3)
    if layer.norm_first:
        inner = inputs + _attended(tape, layer.self_attn, layer_norm(tape, layer.norm1, inputs))
        return inner + _fed_forward(tape, layer, layer_norm(tape, layer.norm2, inner))
    inner = layer_norm(tape, layer.norm1, inputs + _attended(tape, layer.self_attn, inputs))
    return layer_norm(tape, layer.norm2, inner + _fed_forward(tape, layer, inner))


def _attended(tape: Tape, layer: nn.MultiheadAttention, inputs: Tensor) -> Tensor:
    projected = affine(tape, inputs, layer.in_proj_weight, layer.in_proj_bias)
    split = (*inputs.shape[:2], layer.num_heads, -1)
    query, key, value = (part.reshape(split).transpose(1, 2) for part in projected.chunk(3, 2))
    attended = functional.scaled_dot_product_attention(query, key, value)
    return affine(tape, attended.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)


def _fed_forward(tape: Tape, layer: nn.TransformerEncoderLayer, inputs: Tensor) -> Tensor:
    return linear(tape, layer.linear2, layer.activation(linear(tape, layer.linear1, inputs)))


ATTENTION_RULES: dict[type[nn.Module], Rule] = {nn.TransformerEncoderLayer: transformer_encoder_layer}
