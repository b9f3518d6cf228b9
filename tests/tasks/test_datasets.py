"""Data sets by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from discreet.tasks.datasets import DATASETS, load_task


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"data\.name: no data set 'digit'; known are .*digits") as error:
        load_task("digit")
    assert all(name in str(error.value) for name in DATASETS)


def test_a_data_set_is_loaded_once_per_process() -> None:
    assert load_task("digits") is load_task("digits")


def test_the_module_loads_no_data_library() -> None:
    ours = "discreet.tasks.datasets, discreet.tasks.partition, discreet.tasks.metrics"
    heavy = {"sklearn", "datasets", "flwr_datasets", "PIL", "pandas", "flwr"}
    code = f"import sys, {ours}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
