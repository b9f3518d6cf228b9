"""What the tests share. No verdict depends on what was drawn today, nor on the clock.

Hypothesis tries the same examples each time; `--hypothesis-profile=search` looks for others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with MNIST and Shakespeare, which the project does not ship; skips where it is missing."""
    folder = Path(os.environ.get("DISCREET_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("needs MNIST in IDX files: name their parent folder in DISCREET_TEST_DATA")
    return folder


@pytest.fixture(autouse=True)
def _the_same_first_weights() -> None:
    """Layers that a test makes start alike, whichever tests ran before it."""
    torch.manual_seed(52813)
