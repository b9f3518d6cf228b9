"""What is installed without an extra: enough for a training loop of one's own, and a command that
says what else it needs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from discreet.settings.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OFFERED = PROJECT["optional-dependencies"]

LOOP = """
import torch
from discreet import DPSGD, LoopPrivacy
from torch.utils.data import TensorDataset

inputs = torch.randn(400, 5)
dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
model = torch.nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
private = DPSGD(model, optimizer, dataset, batch_size=64, epochs=2, target_epsilon=3.0, delta=1e-4)
for batch in private:
    private.step(*batch)
print(private.epsilon())
"""
OTHERS = """
import discreet
from discreet.cli.main import main

discreet.local_dp_mod
try:
    discreet.DPFedAvg
except ModuleNotFoundError as error:
    print(error)
print(main(["simulate", "rounds=1"]))
"""
LACKING = """
import sys
from importlib.machinery import PathFinder

class Installed:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {names}:
            return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


@cache
def homes() -> Mapping[str, list[str]]:
    """The distributions that brought each module here: a third of a second to find out."""
    return packages_distributions()


def brought_by(wanted: list[str]) -> set[str]:
    """The distributions that an installation of some requirements brings."""
    found: set[str] = set()
    left = [Requirement(each) for each in wanted]
    while left:
        needed = left.pop()
        name = canonicalize_name(needed.name)
        if name in found or not _applies(needed):
            continue
        found.add(name)
        try:
            left += [Requirement(each) for each in requires(name) or ()]
        except PackageNotFoundError:  # not needed on this machine
            found.remove(name)
    return found


def _applies(needed: Requirement) -> bool:
    return needed.marker is None or needed.marker.evaluate({"extra": ""})


def modules_beside(distributions: set[str]) -> set[str]:
    """The modules that are installed here, and would not be with these distributions alone."""
    ours = {*distributions, "discreet"}
    return {
        module
        for module, names in homes().items()
        if not ours & {canonicalize_name(name) for name in names}
    }


def run_with(dependencies: list[str], program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds what some requirements install, and nothing else."""
    names = modules_beside(brought_by(dependencies))
    return subprocess.run(
        [sys.executable, "-c", LACKING.replace("{names}", repr(names)) + program],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.processes
def test_a_loop_of_ones_own_needs_no_extra() -> None:
    done = run_with(PROJECT["dependencies"], LOOP)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) <= 3.0


@pytest.mark.processes
def test_what_needs_an_extra_names_it_in_one_line() -> None:
    done = run_with(PROJECT["dependencies"], OTHERS)
    assert done.returncode == 0, done.stderr
    lacks = 'needs omegaconf, which is not installed: pip install "discreet[federation]"'
    assert done.stdout.splitlines() == [f"discreet.DPFedAvg {lacks}", "2"]
    assert done.stderr.splitlines() == [f"discreet: discreet simulate {lacks}"]


@pytest.mark.processes
def test_a_run_that_lacks_a_further_extra_names_that_one() -> None:
    done = run_with([*PROJECT["dependencies"], *OFFERED["federation"]], OTHERS)
    assert done.returncode == 0, done.stderr
    lacks = 'needs sklearn, which is not installed: pip install "discreet[tables]"'
    assert f"discreet: discreet simulate {lacks}" in done.stderr.splitlines()


@pytest.mark.parametrize("module", EXTRAS)
def test_an_extra_brings_the_modules_for_which_it_is_named(module: str) -> None:
    extra = EXTRAS[module]
    direct = {canonicalize_name(Requirement(each).name) for each in OFFERED[extra]}
    bringing = {canonicalize_name(name) for name in homes().get(module, ())}
    assert bringing & brought_by([each for each in OFFERED[extra] if "discreet[" not in each]), (
        direct
    )
