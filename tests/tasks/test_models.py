"""Models by name: sizes, seeds, and a gradient for every example."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from discreet.tasks.datasets import load_task
from discreet.tasks.examples import Examples, Task
from discreet.tasks.models import MODELS, build_model, check_fits, check_model, flatten_parameters

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
def test_a_model_gives_one_row_of_logits_an_example(name: str, shape: tuple[int, ...]) -> None:
    model = build_model(name, shape, 10, seed=7)
    check_model(model)
    assert model(some_inputs(name, shape, 3)).shape == (3, 10)


@pytest.mark.parametrize(("name", "shape"), FITTING)
def test_an_example_does_not_change_the_logits_of_another(name: str, shape: tuple[int, ...]) -> None:
    model, inputs = build_model(name, shape, 10, seed=7), some_inputs(name, shape, 4)
    alone = torch.cat([model(inputs[i : i + 1]) for i in range(4)])
    assert torch.allclose(model(inputs), alone, atol=1e-5)


@pytest.mark.parametrize(("name", "shape"), FITTING)
def test_mapped_gradients_equal_those_of_single_examples(name: str, shape: tuple[int, ...]) -> None:
    model, inputs = build_model(name, shape, 10, seed=7), some_inputs(name, shape, 3)
    targets = torch.tensor([0, 4, 9])
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> Any:
        return cross_entropy(functional_call(model, values, (one[None],)), target[None])

    mapped = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    for i in range(3):
        model.zero_grad()
        cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]).backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(mapped[key][i], parameter.grad, atol=1e-5), key


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


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model\.name: no model 'mpl'; known are logistic_regression, mlp"):
        build_model("mpl", (1, 8, 8), 10, seed=7)


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
    task = Task("plays", table, table, num_classes=98, input_shape=(80,))
    with pytest.raises(ValueError, match="mlp reads numbers, but plays is text"):
        check_fits("mlp", task)
    check_fits("lstm", task)


@pytest.mark.parametrize("name", ["logistic_regression", "mlp", "mlp200", "cnn"])
def test_the_default_data_fits(name: str) -> None:
    check_fits(name, load_task("digits"))


@pytest.mark.parametrize("name", ["logistic_regression", "mlp", "cnn"])
def test_a_model_learns_digits_without_privacy(name: str) -> None:
    # Trained on a third in a few steps; the bar is far above the 10 % of guessing, far below what is reached.
    task = load_task("digits")
    part = dataclasses.replace(task, train=task.train.subset(torch.arange(480))).train
    model = build_model(name, task.input_shape, task.num_classes, seed=7)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(part.inputs), part.targets).backward()
        optimiser.step()
    right = model(task.test.inputs).argmax(1) == task.test.targets
    assert float(right.float().mean()) > 0.8
