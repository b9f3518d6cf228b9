"""A model's parameters as one vector, and the models that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from discreet.tasks.models import build_model, check_model, flatten_parameters, load_parameters, named_parameters_of


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


def test_the_vector_is_a_copy() -> None:
    model = nn.Linear(2, 1)
    flatten_parameters(model).zero_()
    assert float(model.weight.detach().abs().sum()) > 0


def test_loading_does_not_tie_the_model_to_the_vector() -> None:
    model, vector = nn.Linear(2, 1), torch.ones(3)
    load_parameters(model, vector)
    vector.zero_()
    assert flatten_parameters(model).tolist() == [1.0, 1.0, 1.0]


def test_loading_changes_what_the_model_computes() -> None:
    model = nn.Linear(2, 1)
    load_parameters(model, torch.tensor([2.0, 3.0, 0.5]))
    assert model(torch.tensor([[1.0, 10.0]])).item() == 32.5


@pytest.mark.parametrize("shape", [(2,), (4,), (0,), (), (1, 3), (3, 1)])
def test_a_vector_of_another_size_is_refused_and_changes_nothing(shape: tuple[int, ...]) -> None:
    model = nn.Linear(2, 1)
    before = flatten_parameters(model)
    with pytest.raises(ValueError, match="the model has 3 parameters"):
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


def test_named_parameters_restore_the_model() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    other.load_state_dict(named_parameters_of(model, flatten_parameters(model)))
    assert torch.equal(flatten_parameters(model), flatten_parameters(other))


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


def test_group_norm_is_taken() -> None:
    check_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)))


def test_a_buffer_that_would_be_saved_is_refused() -> None:
    with pytest.raises(ValueError, match="the buffer seen, which would leave a client"):
        check_model(Counting(persistent=True))
    check_model(Counting(persistent=False))


@pytest.mark.parametrize("model", [nn.ReLU(), nn.ParameterList([torch.empty(0)])])
def test_a_model_without_parameters_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        check_model(model)


def test_frozen_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"0\.bias is frozen"):
        check_model(model)


def test_parameters_that_are_not_floats_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match=r"scale is torch\.int64; only floating-point"):
        check_model(model)
