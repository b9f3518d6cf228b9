"""A client's part of a step that all clients share: the sum of its clipped gradients, in float64, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.models.models import flatten_parameters
from discreet.privacy.randomness import seeded_source
from discreet.settings.training import TaskConfig
from discreet.training.local_training import LocalSettings, shared_step

SOURCE = seeded_source(40961)
CLIP = 0.05


def some_examples(count: int) -> Examples:
    generator = torch.Generator().manual_seed(40961)
    return Examples(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def some_model() -> nn.Module:
    torch.manual_seed(40961)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def step_of(examples: Examples, *, task: TaskConfig | None = None) -> Tensor:
    model = some_model()
    settings = LocalSettings(1, 20, 0.5, 0.0, task=task or TaskConfig())
    return shared_step(model, flatten_parameters(model), examples, settings=settings, clip=(CLIP, SOURCE))


@pytest.mark.parametrize("task", [TaskConfig(), TaskConfig(class_weights=[0.5, 1.0, 2.0])], ids=["plain", "weighted"])
def test_it_is_minus_the_rate_over_the_public_batch_size_times_a_loop_of_clipped_gradients(task: TaskConfig) -> None:
    model, examples = some_model().double(), some_examples(12)
    weights = torch.tensor(task.class_weights or [1.0, 1.0, 1.0], dtype=torch.float64)
    total = torch.zeros(flatten_parameters(model).shape, dtype=torch.float64)
    for inputs, target in zip(examples.inputs.double(), examples.targets, strict=True):
        loss = nn.functional.cross_entropy(model(inputs), target) * weights[target]
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
        total += gradient * min(1.0, CLIP / float(gradient.norm()))
    assert step_of(examples, task=task).dtype == torch.float64
    torch.testing.assert_close(step_of(examples, task=task), -0.5 / 20 * total, rtol=1e-5, atol=1e-9)


def test_one_example_moves_it_by_at_most_its_norm_and_none_give_zeros() -> None:
    more, fewer = some_examples(12), some_examples(12).subset(torch.arange(1, 12))
    assert float((step_of(more) - step_of(fewer)).norm()) <= 0.5 * CLIP / 20 * (1 + 1e-9)
    assert not step_of(some_examples(12).subset(torch.arange(0))).any()
