"""Each script of examples/dpsgd runs, as a program of its own, and ends at the epsilon that it asked for."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from discreet import DPSGD, LoopPrivacy
from tests.conftest import REPOSITORY

RECIPES = {  # what the last line says, and the package that the script needs beside Discreet's own
    "train": (r"epsilon 3\.000 at delta 1e-4, accuracy on 297 other images (0\.[6-9]\d*)", None),
    "two_processes": (r"epsilon 3\.000 at delta 1e-4, accuracy on 297 other images (0\.[6-9]\d*)", None),
    "lightning_module": (r"epsilon 3\.000 at delta 1e-4, 60 steps, other images right 0\.[6-9]\d*", "lightning"),
    "transformers_trainer": (r"epsilon 8\.000 at delta 1e-4, 60 steps, other texts right 0\.\d*", "transformers"),
}


def test_every_script_is_a_recipe() -> None:
    assert {path.stem for path in (REPOSITORY / "examples" / "dpsgd").glob("*.py")} == RECIPES.keys()


def test_each_setting_on_the_page_for_opacus_is_one_of_ours() -> None:
    ours = re.findall(r"^\|[^|]*\|([^|]*)\|", (REPOSITORY / "docs" / "guide" / "opacus.md").read_text(), re.MULTILINE)
    named = {name for text in ours for name in re.findall(r"(\w+)=", text)}
    known = inspect.signature(DPSGD).parameters.keys() | {field.name for field in fields(LoopPrivacy)}
    assert named - known == {"reduction"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_ends_at_its_epsilon(name: str) -> None:
    said, package = RECIPES[name]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}, which Discreet does not install")
    words = [sys.executable, str(REPOSITORY / "examples" / "dpsgd" / f"{name}.py")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(said, ran.stdout.splitlines()[-1])
