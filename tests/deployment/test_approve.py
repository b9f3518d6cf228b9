"""An approved app is the one that `flwr run` would send, and it stays as it was approved."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from discreet.deployment.approve import main
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower's build


def test_the_app_of_this_checkout_is_approved_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    (app,) = (tmp_path / "apps").iterdir()
    digest = told.split("SHA-256 ")[1].split(",")[0]
    assert len(digest) == len(hashlib.sha256().hexdigest())
    assert app.name.endswith(digest[:8])
    assert (app / "client_app" / "client_app.py").is_file()
    assert not (app / "tests").exists()

    (app / "client_app" / "client_app.py").write_text("kept")
    assert main(["--folder", str(tmp_path)]) == 0
    assert (app / "client_app" / "client_app.py").read_text() == "kept"


@pytest.mark.parametrize("name", ["app.fab", "discreet.discreet.0-1-0.12345678.fab"])
def test_a_file_whose_name_is_not_that_of_its_content_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(build_fab_from_disk(REPOSITORY))
    assert main([str(tmp_path / name), "--folder", str(tmp_path / "approved")]) == 2
    assert not (tmp_path / "approved" / "apps").exists()
