"""Kept modules serve an app that has the very same files, and no other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployment.flower_run import REPOSITORY

PACKAGES = ("client_app", "discreet")

# What a ClientApp's process does: the app's folder comes first on the path, and its app is imported. The kept module
# is marked, so that one that was imported anew is seen.
IMPORT = """
import json, sys
from deployment.flower_fixes.warm_clients import load

load()
kept = sys.meta_path[0].modules
kept["discreet.federated.messages"].mark = "kept"
sys.path.insert(0, sys.argv[1])
import client_app.client_app
from discreet.federated import guarantees, messages
from discreet.reporting import reports

print(json.dumps({
    "kept": messages is kept["discreet.federated.messages"] and messages.mark == "kept",
    "one app": client_app.client_app.decode_order is messages.decode_order,
    "files": [m.__file__ for m in (client_app.client_app, messages, guarantees, reports)],
    "word": getattr(guarantees, "WORD", None),
}))
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, tmp_path / "app" / package)
    return tmp_path / "app"


def ran(app: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", IMPORT, str(app)]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def imported(app: Path) -> dict[str, Any]:
    process = ran(app)
    assert process.returncode == 0, process.stderr
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def test_an_app_with_the_same_files_gets_the_kept_modules_and_the_rest_from_its_own_folder(app: Path) -> None:
    found = imported(app)
    assert found["kept"]
    assert found["one app"]
    assert all(Path(file).is_relative_to(app) for file in found["files"])


def test_one_other_byte_and_every_module_is_imported_from_the_app(app: Path) -> None:
    with (app / "discreet" / "federated" / "guarantees.py").open("a") as file:
        file.write('WORD = "another"\n')
    found = imported(app)
    assert not found["kept"]
    assert found["one app"]
    assert found["word"] == "another"
    assert all(Path(file).is_relative_to(app) for file in found["files"])


def test_a_file_that_the_app_lacks_and_every_module_is_its_own(app: Path) -> None:
    (app / "discreet" / "privacy" / "calibration.py").rename(app / "discreet" / "privacy" / "moved.py")
    process = ran(app)
    assert process.returncode == 1
    assert "No module named 'discreet.privacy.calibration'" in process.stderr
