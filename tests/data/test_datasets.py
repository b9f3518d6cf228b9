"""Data sets by name, and those that come with scikit-learn."""

from __future__ import annotations

import pytest
import torch

from discreet.data.datasets import DATASETS, load_task


def test_an_unknown_name_and_a_path_that_nobody_reads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.name: no data set 'digit'; known are .*digits") as error:
        load_task("digit")
    assert all(name in str(error.value) for name in DATASETS)
    with pytest.raises(ValueError, match=r"data\.path: digits .* reads no path"):
        load_task("digits", path="somewhere")


@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_the_test_set_has_every_class_in_the_share_of_the_whole(name: str) -> None:
    task = load_task(name)
    train, test = task.train.targets.bincount(), task.test.targets.bincount()
    assert torch.allclose(test / (train + test), torch.tensor(0.2), atol=0.02)
