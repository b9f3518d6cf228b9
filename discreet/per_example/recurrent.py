"""Recurrent layers: the functions behind torch.nn.LSTM, GRU, RNN and their cells, and layers for sequences.

PyTorch's kernels keep the gates to themselves, so a layer is unrolled in plain operations here. Each gate before its
activation is a matrix product with the inputs plus one with the hidden state before it, so the gradients at the gates
and these two factors give the gradients of all parameters (`weights.product_terms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from discreet.per_example.calls import Call, Rule, Ruled
from discreet.per_example.layouts import CONSTANT, Layout, Unserved
from discreet.per_example.terms import Term
from discreet.per_example.weights import product_terms

State = tuple[Tensor, ...]  # hidden, and for an LSTM the cell


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
        return lstm_layer(inputs, self.input_weight, self.hidden_weight, self.bias)


def lstm_layer(inputs: Tensor, input_weight: Tensor, hidden_weight: Tensor, bias: Tensor) -> Tensor:
    """The hidden states of `LSTMLayer`, in plain operations; a `Watch` takes it as one."""
    given = (inputs, input_weight, hidden_weight, bias)
    if has_torch_function(given):
        found: Tensor = handle_torch_function(lstm_layer, given, *given)
        return found
    gates = functional.linear(inputs, input_weight, bias)
    start = gates.new_zeros(len(gates), hidden_weight.shape[1])
    state, after = (start, start), []
    for step in gates.unbind(1):
        state = _lstm(step, functional.linear(state[0], hidden_weight), state)
        after.append(state[0])
    return torch.stack(after, dim=1)


class LastStep(nn.Module):
    """The last step of a sequence: (n, steps, width) to (n, width)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, -1]


class ClassesSecond(nn.Module):
    """(n, steps, classes) to (n, classes, steps), as losses of torch.nn take sequences."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.transpose(1, 2)


def _lstm(gates: Tensor, product: Tensor, state: State) -> tuple[Tensor, Tensor]:
    enter, forget, candidate, leave = (gates + product).chunk(4, dim=1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(gates: Tensor, product: Tensor, state: State) -> State:
    (reset, update, new), (by_reset, by_update, by_new) = gates.chunk(3, dim=1), product.chunk(3, dim=1)
    candidate = (new + (reset + by_reset).sigmoid() * by_new).tanh()
    return (candidate + (update + by_update).sigmoid() * (state[0] - candidate),)


# By kind: the next state from the gates' part of the inputs, that of the hidden state, and the state before.
_STEPS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda gates, product, state: ((gates + product).tanh(),),
    "rnn_relu": lambda gates, product, state: ((gates + product).relu(),),
}


def _run(
    call: Call, parameters: Sequence[Tensor | None], inputs: Tensor, state: State, *, backwards: bool = False
) -> tuple[Tensor, State]:
    """One direction of one layer over the steps of inputs (n, T, d): its hidden states (n, T, hidden), and the last
    state. `parameters`: weights of the inputs and of the hidden state, then their biases, if there are any."""
    to_gates, to_hidden, bias, hidden_bias = (*parameters, None, None)[:4]
    assert to_gates is not None
    assert to_hidden is not None
    own, hidden = ([call.weight(value) for value in pair] for pair in ((to_gates, bias), (to_hidden, hidden_bias)))
    kind = call.name.removesuffix("_cell").removesuffix("_layer")
    gates = functional.linear(inputs, to_gates, bias)
    # Gradients at zeros that are added are those of the products with the hidden state.
    added = torch.zeros_like(gates, requires_grad=True) if kind == "gru" else None
    zeros: Sequence[Any] = [None] * inputs.shape[1] if added is None else added.unbind(1)
    befores, afters = [], []
    steps = list(zip(gates.unbind(1), zeros, strict=True))
    for step, zero in reversed(steps) if backwards else steps:
        befores.append(state[0])
        product = functional.linear(state[0], to_hidden, hidden_bias)
        state = _STEPS[kind](step, product if zero is None else product + zero, state)
        afters.append(state[0])
    before, after = (torch.stack(values[::-1] if backwards else values, dim=1) for values in (befores, afters))

    def of_hidden(grads: Tensor) -> list[Term]:
        return product_terms(hidden[0], hidden[1], before, grads) if any(hidden) else []

    def of_gates(grads: Tensor) -> list[Term]:
        terms = product_terms(own[0], own[1], inputs, grads) if any(own) else []
        return [*terms, *of_hidden(grads)] if added is None else terms

    call.note(gates, of_gates, *own, *(hidden if added is None else []))
    if added is not None:
        call.note(added, of_hidden, *hidden)
    return after, state


def _is_each_ones(call: Call, start: Tensor) -> bool:
    """True for a state (layers, n, hidden) of the examples, or one that is the same for all of them."""
    tag = call.watch.tag(start)
    return bool(tag == Layout(1) or (tag is CONSTANT and (start == start[:, :1]).all()))


def _layers(call: Call) -> Ruled:
    packed = isinstance(call.args[3], list | tuple)
    inputs, *_, parameters, biased, count, dropout, training, both = call.args if packed else call.args[:-1]
    start, batch_first = call.args[2 if packed else 1], not packed and call.args[-1]
    starts: State = tuple(start) if call.name == "lstm" else (start,)
    layout, wanted = call.layout(inputs), Layout(0 if batch_first else 1)
    if packed and layout is not None and layout.after == 1:  # of equal lengths: (T * n, d)
        inputs, layout = inputs.view(layout.before, call.count, -1), wanted
    if layout != wanted or inputs.dim() != 3 or not all(_is_each_ones(call, value) for value in starts):
        raise Unserved(f"{call.name} of examples in another dimension")
    each, ways = 4 if biased else 2, 2 if both else 1
    if len(parameters) != each * count * ways:
        raise Unserved(f"{call.name} with projections")
    values, ends = inputs if batch_first else inputs.transpose(0, 1), list[State]()
    for layer in range(count):
        if layer and training and dropout:
            values = functional.dropout(values, dropout)
        found = []
        for way in range(ways):
            place = layer * ways + way
            own, state = parameters[place * each : (place + 1) * each], tuple(value[place] for value in starts)
            after, end = _run(call, own, values, state, backwards=way == 1)
            found.append(after)
            ends.append(end)
        values = torch.cat(found, dim=2) if both else found[0]
    outputs = values if batch_first else values.transpose(0, 1)
    last = [torch.stack(parts) for parts in zip(*ends, strict=True)]
    if packed:
        outputs, layout = outputs.flatten(0, 1), Layout(0, len(outputs))
    return (outputs, *last), [layout, *[Layout(1)] * len(last)]


def _single(call: Call) -> Ruled:
    inputs, start, *parameters = call.args
    states: State = tuple(start) if call.name == "lstm_cell" else (start,)
    if any(call.layout(value) != Layout(0) or value.dim() != 2 for value in (inputs, *states)):
        raise Unserved(f"{call.name} of examples in another dimension")
    _, end = _run(call, parameters, inputs.unsqueeze(1), states)
    return end if call.name == "lstm_cell" else end[0], Layout(0)


def _own(call: Call) -> Ruled:
    inputs, *parameters = call.args
    layout = call.layout(inputs)
    if layout != Layout(0) or inputs.dim() != 3:
        raise Unserved("an LSTMLayer of examples in another dimension")
    start = inputs.new_zeros(len(inputs), parameters[1].shape[1])
    return _run(call, parameters, inputs, (start, start))[0], layout


RECURRENT_RULES: dict[str, Rule] = {
    "lstm_layer": _own,
    **dict.fromkeys(_STEPS, _layers),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _single),
}
