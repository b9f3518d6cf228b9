"""Data sets by name, and those that come with scikit-learn."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from discreet.tasks.datasets import DATASETS, load_task


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"data\.name: no data set 'digit'; known are .*digits") as error:
        load_task("digit")
    assert all(name in str(error.value) for name in DATASETS)


def test_the_module_loads_no_data_library() -> None:
    ours = "discreet.tasks.datasets, discreet.tasks.partition, discreet.tasks.metrics"
    heavy = {"sklearn", "datasets", "flwr_datasets", "PIL", "pandas", "flwr"}
    code = f"import sys, {ours}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_digits_are_images_in_the_unit_range() -> None:
    task = load_task("digits")
    assert (len(task.train), len(task.test)) == (1437, 360)
    assert task.shape.input_shape == (1, 8, 8)
    assert (float(task.train.inputs.min()), float(task.train.inputs.max())) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_the_test_set_has_every_class_in_the_share_of_the_whole(name: str) -> None:
    task = load_task(name)
    train, test = task.train.targets.bincount(), task.test.targets.bincount()
    assert torch.allclose(test / (train + test), torch.tensor(0.2), atol=0.02)


def test_a_path_is_refused_where_none_is_read() -> None:
    with pytest.raises(ValueError, match=r"data\.path: digits .* reads no path"):
        load_task("digits", path="somewhere")
