"""The planted faults fit the source, and each is caught by its test."""

from __future__ import annotations

import ast

import pytest

from tests.faults import CHECKS, FAULTS
from tests.planting import BROKE, CAUGHT, SURVIVED, TESTS, Fault, place_of, verdict

SAMPLE = {
    "a virtual member is believed without a ticket",
    "a charge goes through although another was made since the budget was looked at",
    "a mechanism may open a masked sum before it is charged",
}


def test_each_fault_has_a_name_patches_what_is_there_and_names_a_test_that_exists() -> None:
    assert {fault.name for fault in FAULTS} >= SAMPLE
    assert len({fault.name for fault in (*FAULTS, *CHECKS)}) == len(FAULTS) + len(CHECKS) >= 40
    for fault in FAULTS:
        place_of(fault.at)
        path, _, name = fault.test.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text(), fault.name


def test_no_fault_hides_behind_another_of_the_same_test() -> None:
    written = ast.walk(ast.parse((TESTS / "faults.py").read_text()))
    calls = [node for node in written if isinstance(node, ast.Call)]
    made = [call for call in calls if getattr(call.func, "id", "") == "Fault"]
    assert len(made) == len(FAULTS) + len(CHECKS)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if fault.name in SAMPLE else pytest.mark.slow)
        for fault in FAULTS
    ],
    ids=lambda fault: fault.name,
)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    assert verdict(fault) == CAUGHT


@pytest.mark.slow
def test_what_is_no_fault_survives_and_an_outdated_one_does_not_count_as_caught() -> None:
    assert [verdict(fault) for fault in CHECKS] == [SURVIVED, BROKE]
