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
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class LSTMSteps(torch.autograd.Function):
    """The hidden states (n, T + 1, hidden) before the first step and after each, and the last cell
    state (n, hidden), from the inputs' part of the gates (n, T, 4 * hidden), the weight and the
    bias of the hidden state, and its first states.

    The weight and the bias get no gradient here: it follows from that of the gates.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, steps, width = len(gates), gates.shape[1], hidden.shape[1]
        active = gates.clone(memory_format=torch.contiguous_format)
        if bias is not None:
            active += bias
        hiddens = gates.new_empty(count, steps + 1, width)
        cells = gates.new_empty(count, steps + 1, width)
        bounded = gates.new_empty(count, steps, width)  # tanh of the cell states
        hiddens[:, 0] = hidden
        cells[:, 0] = cell
        turned = weight.t()
        before = hiddens[:, 0]
        last = cells[:, 0]
        parts = active.view(count, steps, 4, width).unbind(2)
        for step in zip(
            active.unbind(1),
            *(part.unbind(1) for part in parts),
            hiddens.unbind(1)[1:],
            cells.unbind(1)[1:],
            bounded.unbind(1),
            strict=True,
        ):
            all_gates, enter, forget, candidate, leave, after, now, short = step
            all_gates.addmm_(before, turned)
            all_gates[:, : 2 * width].sigmoid_()
            candidate.tanh_()
            leave.sigmoid_()
            torch.mul(forget, last, out=now).addcmul_(enter, candidate)
            torch.mul(leave, torch.tanh(now, out=short), out=after)
            before, last = after, now
        ctx.save_for_backward(weight, active, cells, bounded)
        return hiddens, last.clone()

    @staticmethod
    def backward(ctx: Any, of_hiddens: Tensor, of_cell: Tensor) -> Any:
        weight, active, cells, bounded = ctx.saved_tensors
        count, steps, width = bounded.shape
        grads = torch.empty_like(active)
        parts = (each.view(count, steps, 4, width).unbind(2) for each in (grads, active))
        of_parts, values = ([part.unbind(1) for part in some] for some in parts)
        of_all = grads.unbind(1)
        of_each = of_hiddens.unbind(1)
        befores = cells.unbind(1)
        shorts = bounded.unbind(1)
        of_state = of_each[steps]
        of_last = of_cell
        for at in reversed(range(steps)):
            enter, forget, candidate, leave = (part[at] for part in values)
            of_enter, of_forget, of_candidate, of_leave = (part[at] for part in of_parts)
            short = shorts[at]
            _sigmoid_backward(of_state * short, leave, grad_input=of_leave)
            of_last = of_last + torch.ops.aten.tanh_backward(of_state * leave, short)
            _sigmoid_backward(of_last * candidate, enter, grad_input=of_enter)
            _sigmoid_backward(of_last * befores[at], forget, grad_input=of_forget)
            _tanh_backward(of_last * enter, candidate, grad_input=of_candidate)
            of_last = of_last * forget
            of_state = torch.addmm(of_each[at], of_all[at], weight)
        return grads, None, None, of_state, of_last
