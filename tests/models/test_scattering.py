"""Scattering features: fixed, of one image at a time, bounded, and the same wherever they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from discreet.data.datasets import load_task
from discreet.models.model_check import check_model
from discreet.models.models import build_model
from discreet.models.scattering import Scattering, features_of, split_fixed
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

IMAGES = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(30977))


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 32, 32)])
def test_features_are_as_many_as_said_and_bounded(shape: tuple[int, ...]) -> None:
    fixed = Scattering(shape)
    features = fixed(torch.rand(4, *shape))
    assert features.shape == (4, fixed.out_features)
    assert bool((features.norm(dim=1) <= 1).all())
    assert bool(features.isfinite().all())


def test_an_image_does_not_change_the_features_of_another() -> None:
    fixed, others = Scattering((1, 28, 28)), IMAGES.clone()
    others[1:] = 1 - others[1:]
    torch.testing.assert_close(fixed(IMAGES)[0], fixed(others)[0], rtol=0, atol=1e-6)


def test_a_line_answers_most_to_the_wavelet_across_it() -> None:
    image = torch.zeros(1, 1, 32, 32)
    image[..., ::3] = 1.0  # upright lines, about a wave of the fine wavelets apart
    fixed = Scattering((1, 32, 32))
    found = torch.nn.functional.conv2d(image, fixed.fine)
    strengths = found[:, :8].square().add(found[:, 8:].square()).mean((0, 2, 3))
    assert int(strengths.argmax()) == 0  # direction 0 waves from left to right


@pytest.mark.parametrize("shape", [(1, 28), (1, 28, 30)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"model\.name: scattering reads images .* multiples of 4"):
        build_model("scattering", shape, 10, seed=1)


def test_only_the_linear_part_is_trained_and_saved() -> None:
    model = build_model("scattering", (1, 28, 28), 10, seed=1)
    check_model(model)
    fixed, learned = split_fixed(model)
    assert fixed is model.get_submodule("0")
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    assert sum(values.numel() for values in learned.parameters()) == 81 * 49 * 10 + 10
    assert split_fixed(learned) == (None, learned)


def test_features_computed_once_are_those_of_the_whole_model() -> None:
    task = load_task("digits")
    model = build_model("scattering", task.shape.input_shape, 10, seed=1)
    fixed, learned = split_fixed(model)
    assert fixed is not None
    features = features_of(fixed, task.test, batch_size=7)
    assert torch.equal(features.targets, task.test.targets)
    torch.testing.assert_close(learned(features.inputs), model(task.test.inputs), rtol=0, atol=1e-5)
    assert features_of(Scattering(task.shape.input_shape), task.test) is features


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
