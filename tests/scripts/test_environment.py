"""`. scripts/environment` in each shell that people use: what it makes, what it leaves as it was,
and how it fails."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Stands for Python: makes a "venv" of itself, and its pip writes down what it was asked for and
# ends as FAIL says.
PYTHON = """#!/bin/sh
case "$*" in
"-c "*) exit ${OLD:-0} ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip "*) echo "$*" >> "$(dirname "$0")/asked" && exit ${FAIL:-0} ;;
esac
"""
UNSET = ("VIRTUAL_ENV", "DISCREET_VENV", "CI")
AFTER = 'echo "status=$? folder=$PWD venv=${VIRTUAL_ENV:-none} mode=$-"'


@pytest.fixture(params=["bash", "zsh", "sh"])
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"needs the shell {request.param}")
    return str(request.param)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "checkout" / "scripts").mkdir(parents=True)
    for name in ("scripts/environment", "scripts/check", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path / "checkout"


def sourced(
    shell: str, checkout: Path, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The file sourced from a folder, and what the shell says after it."""
    own = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment = own | {"PYTHON": str(checkout.parent / "python"), **variables}
    line = f". {os.path.relpath(checkout, folder)}/scripts/environment; {AFTER}"
    return subprocess.run(
        [shell, "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_makes_the_environment_once_and_leaves_the_shell_where_it_was(
    shell: str, checkout: Path
) -> None:
    for _ in range(2):
        done = sourced(shell, checkout, checkout, TORCH_INDEX="file:///index/cpu")
        assert f"status=0 folder={checkout} venv={checkout / '.venv'}" in done.stdout, done.stderr
        assert "e" not in done.stdout.rsplit("mode=")[1]
    asked = (checkout / ".venv" / "bin" / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["torch", f"{checkout}[dev]"]
    assert all(f"--constraint {checkout}/constraints.txt" in line for line in asked)
    assert ["file:///index/cpu" in line for line in asked] == [True, False]


@pytest.mark.parametrize(("answer", "status"), [("n", 1), ("", 0), ("y", 0)])
def test_at_a_terminal_it_asks_before_it_installs(
    answer: str, status: int, shell: str, checkout: Path
) -> None:
    own, other = pty.openpty()
    os.write(own, f"{answer}\n".encode())
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment |= {"PYTHON": str(checkout.parent / "python")}
    done = subprocess.run(
        [shell, "-c", f". scripts/environment; {AFTER}"],
        cwd=checkout,
        env=environment,
        stdin=other,
        stdout=subprocess.PIPE,
        stderr=other,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(other)
    said = ""
    with suppress(OSError):  # at the end of a terminal; a read before gives a part
        while piece := os.read(own, 10_000):
            said += piece.decode()
    os.close(own)
    assert f"status={status} " in done.stdout, said
    assert "Install? [Y/n]" in said
    assert (checkout / ".venv" / "bin" / "asked").exists() == (status == 0)
