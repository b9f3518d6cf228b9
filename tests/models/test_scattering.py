"""Scattering features: fixed, of one image at a time, bounded, and the same wherever they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from discreet.data.datasets import load_task
from discreet.models.fixed_part import features_of, split_fixed
from discreet.models.models import build_model
from discreet.models.scattering import Scattering
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

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


@pytest.mark.parametrize("privacy", ["user", "example"])
def test_batched_and_sequential_give_the_same_run(tmp_path: Path, privacy: str) -> None:
    words = ["model.name=scattering", "data.num_clients=6", "sampling.kind=everyone", "rounds=2", "seed=40093"]
    words += ["data.partition=sampled", "data.examples_per_client=40"]
    words += ["training.learning_rate=5", "training.epochs=2", "privacy.delta=1e-5"]
    if privacy == "example":
        words += ["privacy.user.enabled=false", "privacy.user.target_epsilon=null"]
        words += ["privacy.example.enabled=true", "privacy.example.noise_multiplier=2"]
    found = []
    for engine in ("batched", "sequential"):
        simulate(load_config([*words, f"engine={engine}", f"output_dir={tmp_path / engine}"]))
        found.append(RunFolder(tmp_path / engine).read_metrics()[-1])
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-4)
    assert found[0]["accuracy"] == pytest.approx(found[1]["accuracy"], abs=0.01)
