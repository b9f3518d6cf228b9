"""What the tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with MNIST and Shakespeare, which the project does not ship; skips where it is missing."""
    folder = Path(os.environ.get("DISCREET_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("needs MNIST in IDX files: name their parent folder in DISCREET_TEST_DATA")
    return folder
