"""The steps of an LSTM with a derivative of their own: autograd takes several times as long for the
dozen small operations of each step, and keeps what it does not need.

With i, f, g, o the gates after their activations, c' the cell state before a step and c after it:
c = f c' + i g, and h = o tanh(c). The gradients are those of these two formulas (Hochreiter and
Schmidhuber 1997, with a forget gate).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward


class LSTMSteps(torch.autograd.Function):
    """The hidden states (n, T + 1, hidden) before the first step and after each, and the last cell
    state (n, hidden), from the inputs' part of the gates (n, T, 4 * hidden), the weight and the
    bias of the hidden state, and its first states.

    The weight and the bias get no gradient here: it follows from that of the gates.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor | None, *state: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, steps, gate_width = gates.shape
        width = gate_width // 4
        # Steps come first, so that each is one piece of memory.
        active = gates.transpose(0, 1).clone(memory_format=torch.contiguous_format)
        if bias is not None:
            active += bias
        hiddens = gates.new_empty(steps + 1, count, width)
        cells = gates.new_empty(steps + 1, count, width)
        bounded = gates.new_empty(steps, count, width)  # tanh of the cell states
        hiddens[0], cells[0] = state
        turned = weight.t()
        before = hiddens[0]
        last = cells[0]
        by_gate = active.view(steps, count, 4, width)
        for all_gates, both, candidate, leave, after, now, short in zip(
            active.unbind(),
            by_gate[:, :, :2].unbind(),
            by_gate[:, :, 2].unbind(),
            by_gate[:, :, 3].unbind(),
            hiddens[1:].unbind(),
            cells[1:].unbind(),
            bounded.unbind(),
            strict=True,
        ):
            all_gates.addmm_(before, turned)
            both.sigmoid_()
            candidate.tanh_()
            leave.sigmoid_()
            enter, forget = both.unbind(1)
            torch.mul(forget, last, out=now).addcmul_(enter, candidate)
            torch.mul(leave, torch.tanh(now, out=short), out=after)
            before = after
            last = now
        ctx.save_for_backward(weight, active, cells, bounded)
        return hiddens.transpose(0, 1), last.clone()

    @staticmethod
    def backward(ctx: Any, of_hiddens: Tensor, of_cell: Tensor) -> Any:
        weight, active, cells, bounded = ctx.saved_tensors
        steps, count, width = bounded.shape
        enter, forget, candidate, leave = active.view(steps, count, 4, width).unbind(2)
        # The derivatives of a cell state by its gates before their activations, and of a hidden
        # state by the last one; those of the loss take their place.
        grads = torch.empty_like(active)
        by_gate = grads.view(steps, count, 4, width)
        _sigmoid_backward(candidate, enter, grad_input=by_gate[:, :, 0])
        _sigmoid_backward(cells[:-1], forget, grad_input=by_gate[:, :, 1])
        _tanh_backward.grad_input(enter, candidate, grad_input=by_gate[:, :, 2])
        _sigmoid_backward(bounded, leave, grad_input=by_gate[:, :, 3])
        of_state, *of_each = of_hiddens.transpose(0, 1).contiguous().unbind()[::-1]
        of_last = of_cell
        backwards = (
            grads.unbind(),
            by_gate[:, :, :3].unbind(),
            by_gate[:, :, 3].unbind(),
            _tanh_backward(leave, bounded).unbind(),
            forget.unbind(),
        )
        steps_back = zip(*(each[::-1] for each in backwards), of_each, strict=True)
        for all_gates, of_gates, of_leave, by_cell, kept, of_before in steps_back:
            of_last = torch.addcmul(of_last, of_state, by_cell)
            of_leave *= of_state
            of_gates *= of_last.unsqueeze(1)
            of_last = of_last * kept
            of_state = torch.addmm(of_before, all_gates, weight)
        return grads.transpose(0, 1), None, None, of_state, of_last
