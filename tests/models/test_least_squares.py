"""Least squares in one round: an update is X'X and X'y, and the model is the ridge regression on
their sum."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from discreet.data.examples import TaskShape
from discreet.data.targets import NUMBERS, Target
from discreet.models.least_squares import LOGITS, LeastSquares
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.predictions import load_model
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.settings.training import LEAST_SQUARES, TaskConfig
from discreet.simulation.in_process import simulate
from discreet.training.losses import check_task, least_squares
from tests.command import export
from tests.tables.made_tables import make_project


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(40127)
    inputs = torch.randn(count, 3, generator=draws)
    return inputs, (inputs[:, 0] + torch.randn(count, generator=draws) > 0).long()


def test_a_step_adds_the_sums_whose_norm_is_that_of_the_products_of_a_row() -> None:
    model = LeastSquares(3, 2).train()
    inputs, targets = rows(5)
    least_squares(model(inputs), targets).mean().backward()
    x = torch.cat([inputs, torch.ones(5, 1)], dim=1).double()
    squares = torch.zeros(10, dtype=torch.float64)
    for place, (i, j) in enumerate(zip(*np.triu_indices(4), strict=True)):
        squares[place] = (x[:, i] * x[:, j]).mean() * (1 if i == j else math.sqrt(2))
    shares = torch.nn.functional.one_hot(targets, 2).double()
    products = x.T @ shares / 5 * model.weight_of_products
    assert model.squares.grad is not None
    assert model.products.grad is not None
    assert torch.allclose(-model.squares.grad.double(), squares, atol=1e-5)
    assert torch.allclose(-model.products.grad.double(), products, atol=1e-5)
    # one row: |x x'| = |x|^2, and |x y'| = |x|
    model.zero_grad()
    least_squares(model(inputs[:1]), targets[:1]).mean().backward()
    norm = float((model.squares.grad.square().sum() + model.products.grad.square().sum()).sqrt())
    length = float(x[0].norm())
    assert norm == pytest.approx(math.hypot(length**2, model.weight_of_products * length), rel=1e-5)


def test_without_noise_the_model_is_least_squares_of_each_class() -> None:
    model = LeastSquares(3, 2).train()
    inputs, targets = rows(400)
    least_squares(model(inputs), targets).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    x = np.c_[inputs.numpy(), np.ones(400)]
    expected, *_ = np.linalg.lstsq(x, np.eye(2)[targets.numpy()], rcond=None)
    found = model.eval()(inputs).detach().numpy()
    # a ridge of a thousandth
    assert found == pytest.approx(LOGITS * (x @ expected), abs=0.01)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("table"), people=400, tested=400)


@pytest.mark.usefixtures("example_here")
def test_one_round_is_charged_once_and_learns(project: Path, tmp_path: Path) -> None:
    words = ["experiment=table_once", f"data.path={project}", "data.num_clients=400"]
    run = tmp_path / "run"
    outcome = simulate(*load_asked([*words, "seed=40127", f"output_dir={run}"]))
    assert outcome.checkpoint.round == 1
    (row,) = RunFolder(run).read_metrics()
    assert row["epsilon_user"] == pytest.approx(8, abs=0.01)
    assert (row["auc"] or 0) > 0.65
    assert (row["loss"] or 9) < 0.4
    assert export([str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "shapes.csv").read_text().count("log odds of yes") > 50
    saved = load_model(run)
    assert saved.model(torch.zeros(1, *saved.shape.input_shape)).shape == (1, 2)


def test_secure_aggregation_opens_the_sum_alone(project: Path, tmp_path: Path) -> None:
    words = ["experiment=table_once", f"data.path={project}", "data.num_clients=40", "seed=40127"]
    words += ["data.partition=owners", "privacy.user.aggregation=secure", "privacy.accountant=rdp"]
    words += ["training.batch_size=4096", "privacy.delta=1e-3", f"output_dir={tmp_path / 'run'}"]
    simulate(*load_asked(words))
    assert set(load_file(tmp_path / "run" / "model.safetensors")) == {"squares", "products"}


@pytest.mark.parametrize("word", ["model.name=linear", "task.loss=cross_entropy"])
def test_the_model_and_its_loss_go_together(word: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.loss must be least_squares with"):
        load_config(["experiment=table_once", word])


def test_numbers_are_not_asked_once() -> None:
    target = Target(NUMBERS, ("days",), (0.0,), (9.0,))
    with pytest.raises(ConfigError, match="experiment=table_once is for classes"):
        check_task(TaskConfig(LEAST_SQUARES), TaskShape((3,), 1, target=target), "stays")
