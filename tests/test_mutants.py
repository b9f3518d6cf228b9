"""The planted faults fit the tree, and each is caught."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.mutants import ROOT, Tree, copied_tree, planted
from tests.planted import MUTANTS, Mutant

HARMLESS = Mutant(
    "another word in a docstring",
    "discreet/federated/round.py",
    "How a cohort is drawn.",
    "How cohorts are drawn.",
    ("tests/federated/test_cohort_sampling.py::test_each_connected_client_keeps_its_chance_whoever_else_is_there",),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_still_fits_the_source_and_names_tests_that_exist(mutant: Mutant) -> None:
    ast.parse(planted((ROOT / mutant.file).read_text(), mutant))
    for path, _, name in (test.partition("::") for test in mutant.tests):
        assert f"def {name}(" in (ROOT / path).read_text()


def test_a_text_that_is_no_longer_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"drawn: its old text occurs 0 times in discreet/somewhere\.py"):
        planted("", Mutant("cohorts are drawn", "discreet/somewhere.py", "gone", "new", ()))


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    with copied_tree() as tree:
        yield tree


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(mutant: Mutant, tree: Tree) -> None:
    assert tree.verdict(mutant) == "caught"


@pytest.mark.slow
def test_what_is_no_fault_survives(tree: Tree) -> None:
    assert tree.verdict(HARMLESS) == "SURVIVED"
