"""Rules for recurrent layers: they run as unrolled cells, whose gates are matrix products over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.privacy.ghost.layers import linear, matrix_entries
from discreet.privacy.ghost.recorder import Records, Rule
from discreet.privacy.ghost.uncovered import Uncovered

State = tuple[Tensor, ...]  # (h,) or (h, c), each (n, hidden)
Cell = Callable[[Tensor, Tensor, State], State]  # from the inputs' and the state's products, (n, gates * hidden)


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one layer in one direction, as PyTorch names them; biases None where there are none."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None


def lstm_step(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    """One step of an LSTM, gates in PyTorch's order i, f, g, o."""
    enter, forget, content, leave = (inputs + recurrent).chunk(4, 1)
    memory = forget.sigmoid() * state[1] + enter.sigmoid() * content.tanh()
    return leave.sigmoid() * memory.tanh(), memory


def gru_step(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    """One step of a GRU, gates in PyTorch's order r, z, n."""
    (reset, update, new), (reset_h, update_h, new_h) = inputs.chunk(3, 1), recurrent.chunk(3, 1)
    content = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (content + (update + update_h).sigmoid() * (state[0] - content),)


def tanh_step(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    return ((inputs + recurrent).tanh(),)


def relu_step(inputs: Tensor, recurrent: Tensor, state: State) -> State:
    return ((inputs + recurrent).relu(),)


def _unroll(records: Records, cell: Cell, sequence: Tensor, state: State, weights: Weights) -> tuple[Tensor, State]:
    """Outputs (n, T, hidden) and the last state for a sequence (n, T, d)."""
    products = linear(records, sequence, weights.w_ih, weights.b_ih)
    count, length, gates = products.shape
    # Zeros that ask for gradients collect those at the recurrent products, all steps in one tensor.
    probe = products.new_zeros(count, length, gates, requires_grad=True)
    hidden = []
    before = []
    for product, zero in zip(products.unbind(1), probe.unbind(1), strict=True):
        before.append(state[0])
        state = cell(product, functional.linear(state[0], weights.w_hh, weights.b_hh) + zero, state)
        hidden.append(state[0])
    _record_recurrent(records, weights, torch.stack(before, 1), probe)
    return torch.stack(hidden, 1), state


def _record_recurrent(records: Records, weights: Weights, before: Tensor, probe: Tensor) -> None:
    weight, bias = records.slot(weights.w_hh), records.slot(weights.b_hh)
    if weight or bias:
        records.add(before, probe, lambda grads: matrix_entries(weight, bias, before, grads))


def _layers(weights: Sequence[Tensor], biased: bool, count: int) -> list[Weights]:
    size = 4 if biased else 2
    if len(weights) != size * count:
        raise Uncovered("a recurrent layer with projections")
    return [Weights(*weights[size * index : size * (index + 1)]) for index in range(count)]


def _rule(cell: Cell, states: int) -> Rule:
    def recurrent(
        records: Records,
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: Any = None,
    ) -> tuple[Tensor, ...]:
        if not isinstance(batch_first, bool):
            raise Uncovered("a packed sequence")
        records.refuse(input, hx)
        if dropout > 0 and train and num_layers > 1:
            raise ValueError("dropout draws random numbers: use eval mode, or set p to 0")
        start = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        directions = 2 if bidirectional else 1
        layers = _layers(params, has_biases, num_layers * directions)
        sequence = input if batch_first else input.transpose(0, 1)
        ends: list[State] = []
        for level in range(num_layers):
            outputs = []
            for direction in range(directions):
                index = level * directions + direction
                data = sequence.flip(1) if direction else sequence
                first = tuple(part[index] for part in start)
                result, end = _unroll(records, cell, data, first, layers[index])
                outputs.append(result.flip(1) if direction else result)
                ends.append(end)
            sequence = torch.cat(outputs, 2)
        sequence = sequence if batch_first else sequence.transpose(0, 1)
        return sequence, *(torch.stack([end[part] for end in ends]) for part in range(states))

    return recurrent


def _cell_rule(cell: Cell, states: int) -> Rule:
    def step(
        records: Records,
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor | State:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        records.refuse(state)
        end = cell(linear(records, input, w_ih, b_ih), linear(records, state[0], w_hh, b_hh), state)
        return end if states > 1 else end[0]

    return step


RECURRENT_RULES: dict[Any, Rule] = {
    torch.lstm: _rule(lstm_step, 2),
    torch.gru: _rule(gru_step, 1),
    torch.rnn_tanh: _rule(tanh_step, 1),
    torch.rnn_relu: _rule(relu_step, 1),
    torch.lstm_cell: _cell_rule(lstm_step, 2),
    torch.gru_cell: _cell_rule(gru_step, 1),
    torch.rnn_tanh_cell: _cell_rule(tanh_step, 1),
    torch.rnn_relu_cell: _cell_rule(relu_step, 1),
}
