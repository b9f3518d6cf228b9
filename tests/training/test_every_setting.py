"""Every setting of local work is read by each path that trains: one that is ignored is found here,
a new one too."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from discreet.models.models import flatten_parameters
from discreet.privacy.randomness import seeded_source
from discreet.settings.training import TrainingConfig
from discreet.training.local_training import (
    ExamplePrivacy,
    LocalSettings,
    local_update,
    settings_without_noise,
)
from tests.node.clients import examples, linear

BASE = TrainingConfig(epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5)
PLAIN = replace(BASE, momentum=0.0)  # adam has no momentum
OTHER = {"optimizer": "adam", "schedule": "cosine"}


def update(training: TrainingConfig, *, private: bool) -> Tensor:
    how = settings_without_noise(training)
    if private:
        how = replace(how, example=ExamplePrivacy(0.5, 1.0))
    start = flatten_parameters(linear())
    source = seeded_source(50069)
    return local_update(linear(), start, examples(9), settings=how, source=source)


@pytest.mark.parametrize("private", [False, True], ids=["sgd", "dp_sgd"])
@pytest.mark.parametrize("name", [each.name for each in fields(TrainingConfig)])
def test_another_value_gives_another_update(name: str, private: bool) -> None:
    base = PLAIN if name == "optimizer" else BASE
    value = getattr(base, name)
    other: Any
    if isinstance(value, str):
        other = OTHER[name]
    elif isinstance(value, bool):
        other = not value
    else:
        other = value + 1 if isinstance(value, int) else value + 0.05
    changed = update(replace(base, **{name: other}), private=private)
    assert not torch.equal(update(base, private=private), changed)


@dataclass(frozen=True)
class WithMore(LocalSettings):
    """Settings with one that is new."""

    nesterov: bool = False


def test_plain_sgd_is_taken_only_if_all_that_it_does_not_read_has_its_default() -> None:
    assert WithMore(1, 4, 0.1, 0.9).is_plain
    assert not WithMore(1, 4, 0.1, 0.9, nesterov=True).is_plain
    assert not LocalSettings(1, 4, 0.1, 0.9, weight_decay=0.1).is_plain
    assert not LocalSettings(1, 4, 0.1, 0.0, optimizer="adam").is_plain
