"""A model that tags each word of a sentence: `model.name=examples.tags.model:build`."""

from __future__ import annotations

from torch import nn

from discreet.layers.recurrent import ClassesSecond, LSTMLayer

WORDS = 30  # `tokens` in data.toml


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Maps ids of words (n, length) to logits (n, num_classes, length), as
    torch.nn.CrossEntropyLoss takes them."""
    return nn.Sequential(
        nn.Embedding(WORDS, 8), LSTMLayer(8, 16), nn.Linear(16, num_classes), ClassesSecond()
    )
