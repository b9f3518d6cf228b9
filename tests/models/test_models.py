"""Models by name: sizes, seeds, a gradient for every example, parameters as one vector, and which are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from discreet.data.examples import Examples
from discreet.evaluation.predictions import named_parameters_of
from discreet.models.model_check import check_model
from discreet.models.models import build_model, flatten_parameters, load_parameters
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.per_example.recurrent import LSTMLayer
from tests.node.clients import clipped, gradients

FITTING = [("mlp", (1, 8, 8)), ("cnn", (1, 8, 8)), ("cnn", (3, 32, 32)), ("scattering", (1, 28, 28)), ("lstm", (12,))]


def some_inputs(name: str, shape: tuple[int, ...], n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20173)
    if name == "lstm":
        return torch.randint(0, 10, (n, *shape), generator=generator)
    return torch.rand(n, *shape, generator=generator)


# McMahan et al. 2017, the 2NN; Tramer and Boneh 2021.
PUBLISHED = [("mlp200", (1, 28, 28), 199_210), ("cnn", (1, 28, 28), 26_010), ("cnn", (3, 32, 32), 550_570)]


def test_a_model_has_the_published_number_of_parameters() -> None:
    for name, shape, published in PUBLISHED:
        assert len(flatten_parameters(build_model(name, shape, 10, seed=7))) == published


@pytest.mark.parametrize(("name", "shape"), FITTING)
def test_clipped_sums_equal_a_loop_of_single_backward_passes(name: str, shape: tuple[int, ...]) -> None:
    model, inputs = build_model(name, shape, 10, seed=419), some_inputs(name, shape, 5)
    targets = torch.arange(5)
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.5)
    each = gradients(model, Examples(inputs, targets))
    torch.testing.assert_close(norms, torch.stack([gradient.norm() for gradient in each]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total, clipped(each, 0.5), rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """Two names for one matrix, as in a language model whose output is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(tokens))


class Counting(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1), persistent=persistent)


def test_tied_parameters_are_counted_once_and_stay_tied() -> None:
    model = Tied()
    check_model(model)
    load_parameters(model, torch.arange(20.0))
    assert len(flatten_parameters(model)) == 5 * 3 + 5
    assert model.output.weight is model.embedding.weight
    assert list(named_parameters_of(model, torch.arange(20.0))) == ["embedding.weight", "output.bias"]


def not_numbers() -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, float("nan"))
    return model


def with_whole_numbers() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Sequential(nn.BatchNorm1d(4))), r"0\.0 is a .*BatchNorm.* mixes the examples .*GroupNorm"),
        (nn.SyncBatchNorm(4), "mixes the examples .*GroupNorm"),
        (Counting(persistent=True), "the buffer seen, which would leave a client"),
        (nn.ReLU(), "no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (not_numbers(), "the parameter bias holds NaN or infinity before any training"),
        (with_whole_numbers(), r"scale is torch\.int64; only floating-point"),
    ],
)
def test_a_model_that_can_not_be_trained_privately_is_refused(model: nn.Module, message: str) -> None:
    check_model(Counting(persistent=False))
    with pytest.raises(ValueError, match=message):
        check_model(model)


def test_the_lstm_layer_gives_the_outputs_of_torch() -> None:
    layer, inputs = LSTMLayer(3, 5), torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(50077))
    theirs = nn.LSTM(3, 5, batch_first=True)
    values = [layer.input_weight, layer.hidden_weight, layer.bias, torch.zeros_like(layer.bias)]
    with torch.no_grad():
        for their, our in zip(theirs.parameters(), values, strict=True):
            their.copy_(our)
    torch.testing.assert_close(layer(inputs), theirs(inputs)[0], atol=1e-6, rtol=1e-5)
