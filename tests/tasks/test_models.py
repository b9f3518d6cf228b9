"""Models by name: sizes, seeds, a gradient for every example, parameters as one vector, and which are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from discreet.federated.predictions import named_parameters_of
from discreet.privacy.rules.recurrent import LSTMLayer
from discreet.tasks.datasets import load_task
from discreet.tasks.examples import Examples, Task, TaskShape
from discreet.tasks.model_check import check_fits, check_model
from discreet.tasks.models import (
    MODELS,
    build_model,
    flatten_parameters,
    load_parameters,
    token_lstm,
)

FITTING = [
    ("logistic_regression", (30,)),
    ("logistic_regression", (1, 28, 28)),
    ("mlp", (1, 8, 8)),
    ("mlp200", (1, 28, 28)),
    ("cnn", (1, 8, 8)),
    ("cnn", (1, 28, 28)),
    ("cnn", (3, 32, 32)),
    ("lstm", (12,)),
]


def some_inputs(name: str, shape: tuple[int, ...], n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20173)
    if name == "lstm":
        return torch.randint(0, 10, (n, *shape), generator=generator)
    return torch.rand(n, *shape, generator=generator)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "published"),
    [
        ("logistic_regression", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 10, 101_770),
        ("mlp200", (1, 28, 28), 10, 199_210),  # McMahan et al. 2017, the 2NN
        ("cnn", (1, 28, 28), 10, 26_010),  # Tramer and Boneh 2021
        ("cnn", (3, 32, 32), 10, 550_570),  # Tramer and Boneh 2021
    ],
)
def test_a_model_has_the_published_number_of_parameters(
    name: str, shape: tuple[int, ...], classes: int, published: int
) -> None:
    assert len(flatten_parameters(build_model(name, shape, classes, seed=7))) == published


@pytest.mark.parametrize(("name", "shape"), FITTING)
def test_an_example_does_not_change_the_logits_of_another(name: str, shape: tuple[int, ...]) -> None:
    model, inputs = build_model(name, shape, 10, seed=7), some_inputs(name, shape, 4)
    alone = torch.cat([model(inputs[i : i + 1]) for i in range(4)])
    assert torch.allclose(model(inputs), alone, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_initial_parameters(name: str) -> None:
    shape = (80,) if name == "lstm" else (1, 8, 8)
    first, again, other = (flatten_parameters(build_model(name, shape, 10, seed=s)) for s in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    build_model("mlp", (1, 8, 8), 10, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (30,)), ("cnn", (1, 9, 9)), ("cnn", (1, 28, 8)), ("lstm", (1, 8, 8))]
)
def test_a_shape_that_a_model_cannot_read_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"model\.name: {name} reads") as error:
        build_model(name, shape, 10, seed=7)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("cnn", "breast_cancer", r"cnn reads images .* not \(30,\) \(data\.name: breast_cancer\)"),
        ("lstm", "breast_cancer", "lstm reads text, but breast_cancer is numbers"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_naming_both(model: str, data: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fits(model, load_task(data))


def test_a_model_of_numbers_does_not_read_text() -> None:
    table = Examples(torch.zeros(4, 80, dtype=torch.int64), torch.arange(4))
    task = Task("plays", table, table, TaskShape((80,), 98))
    with pytest.raises(ValueError, match="mlp reads numbers, but plays is text"):
        check_fits("mlp", task)
    check_fits("lstm", task)


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


def test_a_vector_comes_back_as_it_went_in() -> None:
    model = build_model("cnn", (1, 8, 8), 10, seed=7)
    vector = torch.arange(len(flatten_parameters(model)), dtype=torch.float32)
    load_parameters(model, vector)
    assert torch.equal(flatten_parameters(model), vector)


@pytest.mark.parametrize("shape", [(2,), (4,), (0,), (), (1, 3), (3, 1)])
def test_a_vector_of_another_size_is_refused_and_changes_nothing(shape: tuple[int, ...]) -> None:
    model = nn.Linear(2, 1)
    before = flatten_parameters(model)
    with pytest.raises(ValueError, match="the model has 3 trainable parameters"):
        load_parameters(model, torch.ones(shape))
    assert torch.equal(flatten_parameters(model), before)


def test_values_that_are_not_finite_pass_through() -> None:
    model = nn.Linear(2, 1)
    load_parameters(model, torch.tensor([float("nan"), float("inf"), 0.0]))
    assert str(flatten_parameters(model).tolist()) == "[nan, inf, 0.0]"


def test_half_precision_parameters_travel_as_float32() -> None:
    model = nn.Linear(2, 1).half()
    assert flatten_parameters(model).dtype == torch.float32
    load_parameters(model, torch.tensor([0.5, 1.5, 2.0]))
    assert model.weight.dtype == torch.float16
    assert flatten_parameters(model).tolist() == [0.5, 1.5, 2.0]


def test_tied_parameters_are_counted_once_and_stay_tied() -> None:
    model = Tied()
    check_model(model)
    load_parameters(model, torch.arange(20.0))
    assert len(flatten_parameters(model)) == 5 * 3 + 5
    assert model.output.weight is model.embedding.weight
    assert list(named_parameters_of(model, torch.arange(20.0))) == ["embedding.weight", "output.bias"]


def test_named_parameters_are_copies() -> None:
    vector = torch.ones(3)
    parts = named_parameters_of(nn.Linear(2, 1), vector)
    vector.zero_()
    assert parts["bias"].item() == 1.0
    assert parts["weight"].is_contiguous()


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.BatchNorm2d(4, track_running_stats=False), nn.SyncBatchNorm(4)]
)
def test_batch_norm_is_refused_with_the_reason_and_a_way_out(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"1\.0 is a .*BatchNorm.* mixes the examples .*GroupNorm"):
        check_model(nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer)))


def test_a_buffer_that_would_be_saved_is_refused() -> None:
    with pytest.raises(ValueError, match="the buffer seen, which would leave a client"):
        check_model(Counting(persistent=True))
    check_model(Counting(persistent=False))


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.ParameterList([torch.empty(0)]), nn.Linear(2, 2).requires_grad_(False)]
)
def test_a_model_without_trainable_parameters_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        check_model(model)


def test_frozen_parameters_are_no_part_of_the_vector_but_of_the_named_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    check_model(model)
    vector = torch.arange(8.0)
    load_parameters(model, vector)
    assert torch.equal(flatten_parameters(model), vector)
    named = named_parameters_of(model, -vector)
    assert list(named) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(named["0.weight"], model[0].weight)
    assert torch.equal(torch.cat([value.flatten() for value in list(named.values())[1:]]), -vector)


def test_parameters_that_are_not_floats_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match=r"scale is torch\.int64; only floating-point"):
        check_model(model)


GENERATOR = torch.Generator().manual_seed(50077)


def torch_layer(layer: LSTMLayer) -> nn.LSTM:
    hidden, width = layer.hidden_weight.shape[1], layer.input_weight.shape[1]
    theirs = nn.LSTM(width, hidden, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(layer.input_weight)
        theirs.weight_hh_l0.copy_(layer.hidden_weight)
        theirs.bias_ih_l0.copy_(layer.bias)
        theirs.bias_hh_l0.zero_()
    return theirs


def test_a_layer_gives_the_outputs_of_torch() -> None:
    layer, inputs = LSTMLayer(3, 5), torch.randn(4, 7, 3, generator=GENERATOR)
    assert torch.allclose(layer(inputs), torch_layer(layer)(inputs)[0], atol=1e-6)


def test_a_layer_gives_the_gradients_of_torch() -> None:
    layer, inputs = LSTMLayer(3, 5), torch.randn(4, 7, 3, generator=GENERATOR)
    theirs = torch_layer(layer)
    layer(inputs).square().sum().backward()
    theirs(inputs)[0].square().sum().backward()
    assert torch.allclose(layer.hidden_weight.grad, theirs.weight_hh_l0.grad, atol=1e-5)
    assert torch.allclose(layer.input_weight.grad, theirs.weight_ih_l0.grad, atol=1e-5)
    assert torch.allclose(layer.bias.grad, theirs.bias_ih_l0.grad, atol=1e-5)


def test_the_size_of_the_published_model_follows_from_its_widths() -> None:
    # Embedding 8, two layers of 256 with one bias, 98 characters: 4 * 256 * (in + 256 + 1) a layer.
    model = token_lstm(98, 98, widths=(8, 256, 256))
    expected = 98 * 8 + 1024 * (8 + 257) + 1024 * (256 + 257) + 257 * 98
    assert len(flatten_parameters(model)) == expected
