"""A character model whose per-example gradients are known layer by layer."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn

from discreet.privacy.rules.recurrent import LastStep, LSTMLayer


def character_lstm(num_tokens: int, *, embedding: int = 8, hidden: int = 128, layers: int = 2) -> nn.Sequential:
    """Next-character logits (n, num_tokens) from token ids (n, steps), int64, with at least one step.

    An embedding, LSTM layers, and a linear output from the last step, after McMahan et al. 2017, section 3
    (embedding 8, two layers of 256), with narrower layers. ids outside [0, num_tokens) raise IndexError.
    """
    widths = [embedding] + [hidden] * layers
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(num_tokens, embedding),
            recurrent=nn.Sequential(*(LSTMLayer(before, after) for before, after in pairwise(widths))),
            last=LastStep(),
            output=nn.Linear(hidden, num_tokens),
        )
    )
