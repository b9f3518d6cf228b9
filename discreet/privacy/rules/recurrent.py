"""An LSTM layer whose per-example gradients are known, and what follows its sequence.

torch.nn.LSTM calls fused kernels for which torch.func.vmap has no rule (pytorch issue 105982): it fails on some devices
and is a loop over examples on others. The same recurrence written in plain operations maps over examples like any other
layer, and its gates are matrix products over time, for which there is a rule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.privacy.rules.free_layers import without_parameters
from discreet.privacy.rules.linear import affine, product_terms
from discreet.privacy.rules.terms import Rule, Tape


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


RECURRENT_RULES: dict[type[nn.Module], Rule] = {
    LSTMLayer: lstm,
    LastStep: without_parameters,
    ClassesSecond: without_parameters,
}
