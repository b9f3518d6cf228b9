"""Inputs and targets that a model can't take are named in one line, with what to do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.per_example.objective import Loss, cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum, clipped_sum_by_owner
from tests.per_example.test_per_example_oracle import assert_matches

DRAWS = torch.Generator().manual_seed(6310)
ROWS = torch.randn(6, 1, 8, 8, generator=DRAWS)
CLASSES = torch.arange(6)
MODELS = {
    "perceptron": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)),
}
LOSSES: dict[str, Loss] = {
    "own": cross_entropy,
    "written": lambda outputs, targets: functional.cross_entropy(
        outputs, targets, reduction="none"
    ),
}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def with_a(target: int) -> Tensor:
    return CLASSES.clone().index_fill_(0, torch.tensor([3]), target)


def summed(model: nn.Module, inputs: Any, targets: Tensor, loss: Loss = cross_entropy) -> Any:
    return clipped_gradient_sum(model, inputs, targets=targets, clip_norm=1.0, loss=loss)


@every_model
@every_loss
@pytest.mark.parametrize("wrong", [12, -1])
def test_a_class_number_that_the_model_has_no_output_for_is_named_with_the_range(
    build: Any, loss: Loss, wrong: int
) -> None:
    with pytest.raises(ValueError, match=rf"^targets must be in 0\.\.9 .* got {wrong}: number"):
        summed(build(), ROWS, with_a(wrong), loss)


def test_a_class_number_of_a_position_is_named_with_the_range() -> None:
    model = nn.Conv1d(1, 4, 1)
    targets = torch.tensor([[0, 1, 2], [3, 4, -100]])
    with pytest.raises(ValueError, match=r"^targets must be in 0\.\.3 .* got 4: "):
        summed(model, ROWS[:2, :, 0, :3], targets)


@every_model
def test_padding_as_the_one_target_of_an_example_counts_nothing(build: Any) -> None:
    assert_matches(build(), ROWS, with_a(-100), clip=1.0)


@every_model
def test_inputs_of_another_type_than_the_model_are_named_with_the_change(build: Any) -> None:
    with pytest.raises(ValueError, match=r"^inputs are float64 and the model float32: .*float\(\)"):
        summed(build(), ROWS.double(), CLASSES)
    with pytest.raises(ValueError, match=r"^inputs are uint8 and the model float32: .*float\(\)"):
        summed(build(), ROWS.byte(), CLASSES)
    with pytest.raises(ValueError, match=r"^inputs are float32 and the model float64: .*double"):
        summed(build().double(), ROWS, CLASSES)


def test_of_owners_inputs_of_another_type_are_named_too() -> None:
    batch = ROWS.double(), CLASSES
    with pytest.raises(ValueError, match=r"^inputs are float64 and the model float32"):
        clipped_sum_by_owner(MODELS["convolution"](), batch, CLASSES // 2, clip_norm=1.0)


def test_numbers_of_an_embedding_are_named_with_their_type_and_their_range() -> None:
    model = nn.Sequential(nn.Embedding(50, 3), nn.Flatten(), nn.Linear(12, 10))
    words = torch.randint(0, 50, (6, 4), generator=DRAWS)
    with pytest.raises(ValueError, match=r"^inputs are float32 .* int64: inputs.long\(\)"):
        summed(model, words.float(), CLASSES)
    words[1, 2] = 77
    with pytest.raises(ValueError, match=r"^inputs must be in 0\.\.49, .* got 77: "):
        summed(model, words, CLASSES)


def test_class_numbers_of_another_type_are_named_with_the_change() -> None:
    with pytest.raises(ValueError, match=r"^targets are int32, .* int64: targets.long\(\)"):
        summed(MODELS["convolution"](), ROWS, CLASSES.int())


def test_after_a_wrong_type_a_model_is_as_fast_as_if_it_had_not_been(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = MODELS["convolution"]()
    with pytest.raises(ValueError, match="float64"):
        summed(model, ROWS.double(), CLASSES)
    with caplog.at_level(logging.WARNING, "discreet"):
        assert_matches(model, ROWS, CLASSES, clip=1.0)
    assert "slower" not in caplog.text


def test_an_error_that_is_not_of_types_or_numbers_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        summed(MODELS["perceptron"](), ROWS[..., :6], CLASSES)


@every_model
@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [(ROWS, with_a(12), "got 12"), (ROWS.double(), CLASSES, "inputs are float64")],
    ids=["class", "type"],
)
def test_a_loop_says_the_same(build: Any, inputs: Tensor, targets: Tensor, said: str) -> None:
    model = build()
    privacy = LoopPrivacy(noise_multiplier=1.0, seed=3)
    data = TensorDataset(inputs, targets)
    optimizer = SGD(model.parameters(), lr=0.1)
    loop = DPSGD(model, optimizer, data, batch_size=6, epochs=1, delta=1e-3, privacy=privacy)
    batch = next(iter(loop))
    with pytest.raises(ValueError, match=said):
        loop.step(*batch)
    assert loop.steps_taken == 0


@pytest.mark.parametrize("targets", [CLASSES.unsqueeze(1), torch.eye(6)])
def test_class_numbers_of_another_shape_are_named_with_what_to_do(targets: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^targets are \(6, \d\), and cross-entropy takes class"):
        summed(MODELS["convolution"](), ROWS, targets)


def test_sparse_and_nested_tensors_are_refused_by_name() -> None:
    nested = torch.nested.nested_tensor(list(ROWS), layout=torch.jagged)
    for inputs, kind in ((ROWS.to_sparse(), "sparse"), (nested, "nested")):
        with pytest.raises(ValueError, match=f"must be dense tensors, and one is {kind}"):
            summed(MODELS["convolution"](), inputs, CLASSES)
