"""`scripts/versions` runs the same tests against each version of Flower, and fails if one of them
does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$2" in
    *flwr.__version__*) echo "flwr {flower}" ;;
    *) echo "{flower} $*" >> "{calls}"; echo "{count} passed"; exit {code} ;;
esac
"""


def environment_with(folder: Path, flower: str, *, code: int) -> None:
    """An environment that is complete, whose Python notes what it is asked."""
    name = f"flwr-{flower}-py{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / name / "bin").mkdir(parents=True)
    (folder / name / "complete").touch()
    python = folder / name / "bin" / "python"
    python.write_text(
        PYTHON.format(flower=flower, calls=folder / "calls", count=len(flower), code=code)
    )
    python.chmod(0o700)


@pytest.mark.parametrize("code", [0, 1])
def test_each_version_of_flower_runs_the_same_tests_and_one_that_fails_is_told(
    code: int, tmp_path: Path
) -> None:
    environment_with(tmp_path, "1.41.0", code=code)
    environment_with(tmp_path, "1.42.0", code=0)
    environment_with(tmp_path, "nightly", code=0)
    variables = {
        **os.environ,
        "PYTHON": sys.executable,
        "VERSIONS_FOLDER": str(tmp_path),
        "FLOWERS": "1.41.0 1.42.0 nightly",
    }
    variables.pop("TORCH", None)
    command = [str(ROOT / "scripts" / "versions"), "-k", "masked"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "flwr 1.41.0: 6 passed",
        "flwr 1.42.0: 6 passed",
        "flwr nightly: 7 passed",
    ]
    lines = (tmp_path / "calls").read_text().splitlines()
    first, second, nightly = (line for line in lines if "pytest" in line)
    assert first.removeprefix("1.41.0") == second.removeprefix("1.42.0")
    assert "tests/flower tests/node" in first
    assert "tests/guard" in first
    assert "tests/flower tests/node" in nightly
    assert "tests/guard" not in nightly
    assert all(line.endswith("-k masked") for line in (first, second, nightly))
    assert [line.split()[3] for line in lines if " -m pip " in line] == [
        "install",
        "uninstall",
        "install",
    ]
