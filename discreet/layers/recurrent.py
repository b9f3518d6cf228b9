"""Recurrent layers: the functions behind torch.nn.LSTM, GRU, RNN and their cells, and layers for
sequences.

PyTorch's kernels hide the gates, so a layer is unrolled in plain operations here. Each gate before
its activation is a matrix product with the inputs plus one with the previous hidden state. So the
gradients at the gates and these two factors give the gradients of all parameters
(`terms.product_terms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from discreet.layers.alone import Alone, Rule
from discreet.layers.dropping import dropped
from discreet.layers.lanes import is_lane, parted
from discreet.layers.terms import Term, product_terms

State = tuple[Tensor, ...]  # hidden state, and for an LSTM the cell state


class LSTMLayer(nn.Module):
    """One LSTM layer, (n, steps, width) to (n, steps, hidden), starting from zeros.

    Equal to torch.nn.LSTM with batch_first and one layer, except that it has one bias instead of
    the sum of two. Gates are in its order: input, forget, cell, output. steps is at least 1.
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
    """The hidden states of `LSTMLayer`, in plain operations. A rule treats it as one function."""
    given = (inputs, input_weight, hidden_weight, bias)
    if has_torch_function(given):
        found: Tensor = handle_torch_function(lstm_layer, given, *given)
        return found
    gates = functional.linear(inputs, input_weight, bias)
    start = gates.new_zeros(len(gates), hidden_weight.shape[1])
    state = (start, start)
    after = []
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
    reset, update, new = gates.chunk(3, dim=1)
    by_reset, by_update, by_new = product.chunk(3, dim=1)
    candidate = (new + (reset + by_reset).sigmoid() * by_new).tanh()
    return (candidate + (update + by_update).sigmoid() * (state[0] - candidate),)


# By kind: the next state from the inputs' part of the gates, the hidden state's part, and the
# previous state.
_STEPS: dict[str, Callable[[Tensor, Tensor, State], State]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda gates, product, state: ((gates + product).tanh(),),
    "rnn_relu": lambda gates, product, state: ((gates + product).relu(),),
}


@dataclass(frozen=True, slots=True)
class _Weights:
    """One direction of one layer of a kind: weights of the inputs and of the hidden state, and
    their biases; `projection`: for an LSTM whose hidden state is smaller than its cell state."""

    kind: str
    backwards: bool
    inputs: Tensor
    hidden: Tensor
    bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


def _weights_of(kind: str, backwards: bool, *values: Tensor, projects: bool) -> _Weights:
    if not projects:
        return _Weights(kind, backwards, *values)
    return replace(_Weights(kind, backwards, *values[:-1]), projection=values[-1])


class _Projection:
    """The projection of an LSTM's hidden states, step by step. `added`: zeros (n, T, size), whose
    gradients are those of the projected states."""

    def __init__(self, weight: Tensor, gates: Tensor) -> None:
        self.weight = weight
        self.added = gates.new_zeros(*gates.shape[:2], len(weight), requires_grad=True)
        self.inputs = list[Tensor]()

    def __call__(self, state: State, step: int) -> State:
        self.inputs.append(state[0])
        return (functional.linear(state[0], self.weight) + self.added[:, step], state[1])

    def note(self, alone: Alone, of_each: Callable[[Tensor], Tensor], backwards: bool) -> None:
        """Notes the use of the weight, if it is trained."""
        slot = alone.slot(self.weight)
        if slot is None:
            return
        larger = of_each(torch.stack(self.inputs[::-1] if backwards else self.inputs, dim=1))
        alone.note(self.added, lambda grads: product_terms(slot, None, larger, of_each(grads)))


def _unrolled(
    weights: _Weights,
    gates: Tensor,
    added: Tensor | None,
    smaller: _Projection | None,
    state: State,
) -> tuple[Tensor, Tensor, State]:
    """The hidden states before and after each step (n, T, hidden), and the last state, from the
    inputs' part of the gates (n, T, gates)."""
    if weights.kind == "lstm" and smaller is None and _is_one_type(gates, weights.hidden, *state):
        return _lstm_steps(weights, gates, state)
    zeros: Sequence[Any] = [None] * gates.shape[1] if added is None else added.unbind(1)
    steps = list(zip(range(gates.shape[1]), gates.unbind(1), zeros, strict=True))
    if weights.backwards:
        steps.reverse()
    befores = []
    afters = []
    for at, step, zero in steps:
        befores.append(state[0])
        product = functional.linear(state[0], weights.hidden, weights.hidden_bias)
        state = _STEPS[weights.kind](step, product if zero is None else product + zero, state)
        if smaller is not None:
            state = smaller(state, at)
        afters.append(state[0])
    if weights.backwards:
        befores.reverse()
        afters.reverse()
    return torch.stack(befores, dim=1), torch.stack(afters, dim=1), state


def _lstm_steps(weights: _Weights, gates: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    """`_unrolled` for an LSTM without a projection, whose types are all the same."""
    from discreet.layers.lstm_steps import LSTMSteps  # few models have one

    if weights.backwards:
        gates = gates.flip(1)
    apply: Any = LSTMSteps.apply
    states, cell = apply(gates, weights.hidden, weights.hidden_bias, *state)
    before = states[:, :-1]
    after = states[:, 1:]
    if weights.backwards:
        return before.flip(1), after.flip(1), (after[:, -1], cell)
    return before, after, (after[:, -1], cell)


def _is_one_type(*values: Tensor) -> bool:
    """True for values of one type that stay in it."""
    kinds = {value.dtype for value in values}
    return len(kinds) == 1 and not torch.is_autocast_enabled(values[0].device.type)


def _of_each(values: Tensor, count: int) -> Tensor:
    """(n * k, T, d) -> (n, k * T, d) for n = `count` examples."""
    if len(values) == count:
        return values
    return parted(values, count).flatten(1, 2)


def _run(alone: Alone, weights: _Weights, inputs: Tensor, state: State) -> tuple[Tensor, State]:
    """One direction of one layer over the steps of inputs (n, T, d): its hidden states (n, T,
    hidden), and the last state."""
    own = [alone.slot(value) for value in (weights.inputs, weights.bias)]
    hidden = [alone.slot(value) for value in (weights.hidden, weights.hidden_bias)]
    flat = functional.linear(inputs.flatten(0, 1), weights.inputs, weights.bias)
    if any(hidden) and not flat.requires_grad:  # the weights of the inputs are frozen
        flat.requires_grad_()
    gates = parted(flat, len(inputs))
    # The gradients at added zeros are those of the products with the hidden state.
    if weights.kind == "gru":
        added = torch.zeros_like(gates, requires_grad=True)
    else:
        added = None
    smaller = None
    if weights.projection is not None:
        smaller = _Projection(weights.projection, gates)
    before, after, state = _unrolled(weights, gates, added, smaller, state)

    of_each = partial(_of_each, count=alone.count)

    def of_hidden(grads: Tensor) -> list[Term]:
        if any(hidden):
            return product_terms(hidden[0], hidden[1], of_each(before), of_each(grads))
        return []

    def of_gates(grads: Tensor) -> list[Term]:
        rows = grads.view(gates.shape)
        terms: list[Term] = []
        if any(own):
            terms = product_terms(own[0], own[1], of_each(inputs), of_each(rows))
        if added is None:
            return [*terms, *of_hidden(rows)]
        return terms

    if any((*own, *hidden)):
        alone.note(flat, of_gates)
    if added is not None and any(hidden):
        alone.note(added, of_hidden)
    if smaller is not None:
        smaller.note(alone, of_each, weights.backwards)
    return after, state


@dataclass(frozen=True, slots=True)
class _Stack:
    """The layers of one call. `ways`: 2 if bidirectional. `each`: the number of parameters of a
    direction of a layer. `dropout`: the rate between layers, 0 in evaluation."""

    kind: str
    parameters: Sequence[Tensor]
    count: int
    ways: int
    each: int
    projects: bool
    dropout: float

    def run(
        self, alone: Alone, values: Tensor, states: Sequence[Tensor]
    ) -> tuple[Tensor, list[State]]:
        """The hidden states (n * k, T, ways * hidden) of the last layer for `values` (n * k, T, d),
        and the last state of each direction of each layer."""
        ends = list[State]()
        for layer in range(self.count):
            if layer and self.dropout:
                rows = parted(values, alone.count)
                values = dropped("dropout", rows, self.dropout, alone.draws).flatten(0, 1)
            found = []
            for way in range(self.ways):
                at = layer * self.ways + way
                some = self.parameters[at * self.each : (at + 1) * self.each]
                own = _weights_of(self.kind, way == 1, *some, projects=self.projects)
                state = tuple(value[:, at] for value in states)
                after, end = _run(alone, own, values, state)
                found.append(after)
                ends.append(end)
            if self.ways == 2:
                values = torch.cat(found, dim=2)
            else:
                values = found[0]
        return values, ends


def _layers(kind: str, alone: Alone, *args: Any) -> Any:
    packed = isinstance(args[3], list | tuple)
    inputs, *_, parameters, biased, count, dropout, training, both = args if packed else args[:-1]
    start = args[2 if packed else 1]
    batch_first = packed or args[-1]
    each = len(parameters) // (count * (1 + both))
    projects = kind == "lstm" and each % 2 == 1
    starts: State = tuple(start) if kind == "lstm" else (start,)
    if (
        each != 2 + 2 * biased + projects
        or inputs.dim() != (2 if packed else 3)
        or any(map(is_lane, parameters))
    ):
        return NotImplemented
    rate = dropout if training else 0.0
    stack = _Stack(kind, parameters, count, 1 + both, each, projects, rate)
    values = alone.rows(inputs)
    if not packed:
        values = (values if batch_first else values.transpose(1, 2)).flatten(0, 1)  # (n * k, T, d)
    # (n * k, layers, hidden)
    states = [alone.rows(value).transpose(1, 2).flatten(0, 1) for value in starts]
    values, ends = stack.run(alone, values, states)
    last = [
        parted(torch.stack(parts, 1), alone.count).transpose(1, 2)
        for parts in zip(*ends, strict=True)
    ]
    if not packed:
        values = parted(values, alone.count)
        if not batch_first:
            values = values.transpose(1, 2)
    return (values, *last)


def _single(kind: str, alone: Alone, inputs: Tensor, start: Any, *parameters: Any) -> Any:
    states: State = tuple(start) if kind == "lstm" else (start,)
    if inputs.dim() != 2 or any(map(is_lane, parameters)):
        return NotImplemented
    rows, *befores = (alone.rows(value).flatten(0, 1).unsqueeze(1) for value in (inputs, *states))
    _, end = _run(
        alone, _Weights(kind, False, *parameters), rows, tuple(value[:, 0] for value in befores)
    )
    found = tuple(parted(value, alone.count) for value in end)
    if kind == "lstm":
        return found
    return found[0]


def _own(alone: Alone, inputs: Tensor, *parameters: Any) -> Any:
    if any(map(is_lane, parameters)):
        return NotImplemented
    rows = alone.rows(inputs).flatten(0, 1)
    start = rows.new_zeros(len(rows), parameters[1].shape[1])
    return parted(
        _run(alone, _Weights("lstm", False, *parameters), rows, (start, start))[0], alone.count
    )


RULES: dict[str, Rule] = {
    "lstm_layer": _own,
    **{kind: partial(_layers, kind) for kind in _STEPS},
    **{f"{kind}_cell": partial(_single, kind) for kind in _STEPS},
}
