"""Recurrent layers on the fast way: an LSTM with a projection, and packed rows of numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from discreet.layers.lstm_steps import LSTMSteps
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches, single_gradients

# PyTorch says so of each such layer
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
DRAWS = torch.Generator().manual_seed(2203)
SERIES = torch.randn(6, 5, 4, generator=DRAWS)
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])


class Projected(nn.Module):
    """An LSTM whose hidden state, of 3, is smaller than its cell. Its last cell counts too."""

    def __init__(self, layers: int, *, both: bool, bias: bool) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_layers": layers, "bidirectional": both, "bias": bias}
        self.layer = nn.LSTM(4, 7, batch_first=True, proj_size=3, **sizes)
        self.head = nn.Linear(3 * (1 + both), 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, (_, cell) = self.layer(inputs)
        found: Tensor = self.head(outputs.mean(1)) * cell.mean((0, 2)).unsqueeze(1).cos()
        return found


class Packed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True, proj_size=size)
        self.head = nn.Linear(size or 5, 3)

    def forward(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = self.layer(packed)
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=5)
        return self.head(padded.mean(1))  # type: ignore[no-any-return]


class Last(nn.Module):
    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0][:, -1]


@pytest.fixture(autouse=True)
def the_slow_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discreet.per_example.per_example.built_terms", None)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_lstm_with_a_projection_goes_side_by_side(layers: int, both: bool, bias: bool) -> None:
    model = seeded(lambda: Projected(layers, both=both, bias=bias))
    assert_matches(model, SERIES, CLASSES, clip=0.1)


class Started(nn.Module):
    """An LSTM whose first states are trained, and whose last cell counts too."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        ways = 1 + both
        self.layer = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=both)
        self.first = nn.Parameter(torch.randn(2, 2 * ways, 1, 3))
        self.head = nn.Linear(3 * ways, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, cell = (each.expand(-1, len(inputs), -1).contiguous() for each in self.first)
        outputs, (_, last) = self.layer(inputs, (hidden, cell))
        found: Tensor = self.head(outputs.mean(1)) * last.mean((0, 2)).unsqueeze(1).cos()
        return found


@pytest.mark.parametrize("both", [False, True])
def test_an_lstm_from_states_that_are_trained_goes_side_by_side(both: bool) -> None:
    assert_matches(seeded(lambda: Started(both=both)), SERIES, CLASSES, clip=0.1)


def test_the_steps_of_an_lstm_have_the_values_and_the_derivative_of_its_formulas() -> None:
    layer = nn.LSTM(4, 3, batch_first=True).double()
    flat = nn.functional.linear(SERIES.double(), layer.weight_ih_l0, layer.bias_ih_l0)
    gates, hidden, cell = (
        each.detach().requires_grad_()
        for each in (flat, *torch.randn(2, 6, 3, generator=DRAWS, dtype=torch.float64))
    )
    fixed = layer.weight_hh_l0.detach(), layer.bias_hh_l0.detach()
    states, last = LSTMSteps.apply(gates, *fixed, hidden, cell)  # type: ignore[no-untyped-call]
    wanted, (_, end) = layer(SERIES.double(), (hidden.unsqueeze(0), cell.unsqueeze(0)))
    torch.testing.assert_close(states, torch.cat([hidden.unsqueeze(1), wanted], 1))
    torch.testing.assert_close(last, end[0])
    assert torch.autograd.gradcheck(
        lambda *given: LSTMSteps.apply(given[0], *fixed, *given[1:]),  # type: ignore[no-untyped-call]
        (gates, hidden, cell),
    )


@pytest.mark.parametrize("trained", ["weight_hr_l0", "weight_hh_l0"])
def test_of_an_lstm_with_a_projection_one_weight_may_be_trained_alone(trained: str) -> None:
    model = seeded(lambda: Projected(1, both=False, bias=True)).requires_grad_(False)
    getattr(model.layer, trained).requires_grad_(True)
    assert_matches(model, SERIES, CLASSES, clip=0.01)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_of_a_recurrent_layer_the_weights_of_the_hidden_state_may_be_trained_alone(
    kind: Any,
) -> None:
    model = seeded(lambda: nn.Sequential(kind(4, 3, batch_first=True), Last()))
    model.requires_grad_(False)
    model[0].weight_hh_l0.requires_grad_(True)
    assert_matches(model, SERIES, CLASSES, clip=0.01)


@pytest.mark.parametrize("size", [0, 3])
def test_packed_rows_of_numbers_go_side_by_side(size: int) -> None:
    model = seeded(lambda: Packed(size))
    lengths = torch.tensor([5, 1, 2, 5, 4, 2])
    gradients = single_gradients(model, (SERIES, lengths), CLASSES)
    norms = gradients.norm(dim=1)
    wanted = (0.1 / norms).clamp(max=1) @ gradients
    total, found = clipped_gradient_sum(model, (SERIES, lengths), targets=CLASSES, clip_norm=0.1)
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=0)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-6)
