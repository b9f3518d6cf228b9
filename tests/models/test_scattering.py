"""Scattering features: fixed, of one image at a time, bounded, and the same wherever they are computed."""

from __future__ import annotations

import torch

from discreet.data.datasets import load_task
from discreet.models.fixed_part import features_of, split_fixed
from discreet.models.models import build_model
from discreet.models.scattering import Scattering

IMAGES = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(30977))


def test_an_image_does_not_change_the_features_of_another() -> None:
    fixed, others = Scattering((1, 28, 28)), IMAGES.clone()
    others[1:] = 1 - others[1:]
    torch.testing.assert_close(fixed(IMAGES)[0], fixed(others)[0], rtol=0, atol=1e-6)


def test_features_computed_once_are_those_of_the_whole_model() -> None:
    task = load_task("digits")
    model = build_model("scattering", task.shape.input_shape, 10, seed=1)
    fixed, learned = split_fixed(model, task.test.inputs)
    assert fixed is not None
    features = features_of(fixed, task.test, batch_size=7)
    assert torch.equal(features.targets, task.test.targets)
    torch.testing.assert_close(learned(features.inputs), model(task.test.inputs), rtol=0, atol=1e-5)
    assert features_of(fixed, task.test).inputs is features.inputs
