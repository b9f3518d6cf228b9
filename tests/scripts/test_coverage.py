"""`scripts/coverage` lists the lines that tests do not run."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.processes
def test_a_file_whose_tests_run_is_covered_and_another_is_not() -> None:
    pytest.importorskip("coverage")
    words = [str(REPOSITORY / "scripts" / "coverage"), "tests/privacy/test_person.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("discreet/")]
    shares = {row[0]: int(row[3].removesuffix("%")) for row in rows}
    assert shares["discreet/tables/hints.py"] == 0
    assert shares.get("discreet/privacy/person.py", 100) > 80
