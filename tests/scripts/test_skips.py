"""What tests lacked is said at their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.conftest import pytest_terminal_summary

WANTING = "Skipped: needs bubblewrap: apt-get install bubblewrap"


def test_tests_that_bubblewrap_was_missing_for_are_counted_in_one_line() -> None:
    said: list[str] = []
    reasons = [WANTING, WANTING, "Skipped: needs a GPU"]
    skipped = [SimpleNamespace(longrepr=("file", 1, reason)) for reason in reasons]
    reporter: Any = SimpleNamespace(stats={"skipped": skipped}, write_line=said.append)
    pytest_terminal_summary(reporter)
    assert said == ["2 tests were skipped: needs bubblewrap: apt-get install bubblewrap"]
