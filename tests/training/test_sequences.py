"""A class for each position of padded sequences: losses, gradients and steps are those of single ones, cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.models.models import flatten_parameters
from discreet.per_example.objective import PADDING
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.privacy.randomness import seeded_source
from discreet.settings.training import TaskConfig
from discreet.training.local_training import ExamplePrivacy, LocalSettings, local_update
from discreet.training.losses import loss_of
from tests.sequences import BUILDERS, TAGS, built, sequences

CLIP = 0.3
TASKS = {"plain": TaskConfig(), "with weights": TaskConfig(class_weights=[0.5, 2.0, 1.0, 3.0])}


def single_loss(model: nn.Module, tokens: Tensor, targets: Tensor, task: TaskConfig = TASKS["plain"]) -> Tensor:
    """Of one example, by torch.nn, from its own positions alone: the model never sees the padding."""
    there = int((targets != PADDING).sum())
    if there == 0:
        return sum((value.sum() for value in model.parameters()), torch.zeros(())) * 0
    own = torch.tensor(task.class_weights or [1.0] * TAGS)[targets[:there]]
    values = nn.CrossEntropyLoss(reduction="none")(model(tokens[None, :there])[0].T, targets[:there])
    return (own * values).sum() / there


def single_gradients(model: nn.Module, data: Examples, task: TaskConfig = TASKS["plain"]) -> Tensor:
    pairs = zip(data.inputs, data.targets, strict=True)
    found = [torch.autograd.grad(single_loss(model, *pair, task), list(model.parameters())) for pair in pairs]
    return torch.stack([torch.cat([value.flatten() for value in one]) for one in found])


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("how", BUILDERS)
def test_clipped_sums_are_those_of_single_examples_without_their_padding(how: str, task: TaskConfig) -> None:
    model, data = built(how), sequences(12)
    rows = single_gradients(model, data, task)
    norms = rows.norm(dim=1)
    wanted = (rows * (CLIP / norms.clamp(min=CLIP))[:, None]).sum(0)
    total, found = clipped_gradient_sum(model, data.inputs, targets=data.targets, clip_norm=CLIP, loss=loss_of(task))
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-6)
    empty = (data.targets == PADDING).all(dim=1)
    assert empty.any()
    assert float(found[empty].max()) < 1e-18  # what squares may lose counts


@pytest.mark.parametrize("private", [True, False])
def test_a_clients_step_is_that_of_a_loop_over_its_sequences(private: bool) -> None:
    model, data, rate = built(), sequences(9), 0.7
    start, rows = flatten_parameters(model), single_gradients(model, data)
    example = ExamplePrivacy(CLIP, 0.0) if private else None
    clipped = rows * (CLIP / rows.norm(dim=1).clamp(min=CLIP))[:, None]
    # The mean over all 9 examples, those of padding alone counted.
    wanted = -rate * (clipped if private else rows).sum(0) / 9
    settings = LocalSettings(1, 9, rate, 0.0, example)
    found = local_update(model, start, data, settings=settings, source=seeded_source(4409))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
