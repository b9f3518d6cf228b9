"""A character model whose per-example gradients `torch.func.vmap` can take.

torch.nn.LSTM calls fused kernels for which vmap has no rule (pytorch issue 105982): it fails on some devices
and is a loop over examples on others. The same recurrence written in plain operations maps over examples like
any other model.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn


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

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        projected = inputs @ self.input_weight.T + self.bias
        hidden = cell = inputs.new_zeros(inputs.shape[0], self.hidden_weight.shape[1])
        outputs = []
        for step in projected.unbind(1):
            enter, forget, candidate, leave = (step + hidden @ self.hidden_weight.T).chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


class CharacterLSTM(nn.Module):
    """Next-character logits (n, num_tokens) from token ids (n, steps), int64, with at least one step.

    An embedding, LSTM layers, and a linear output from the last step, after McMahan et al. 2017, section 3
    (embedding 8, two layers of 256), with narrower layers. ids outside [0, num_tokens) raise IndexError.
    """

    def __init__(self, num_tokens: int, *, embedding: int = 8, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, embedding)
        widths = [embedding] + [hidden] * layers
        self.recurrent = nn.Sequential(*(LSTMLayer(a, b) for a, b in pairwise(widths)))
        self.output = nn.Linear(hidden, num_tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.recurrent(self.embedding(tokens))[:, -1])
        return logits
