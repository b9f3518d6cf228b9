"""The notebook of ten minutes runs as it stands, and its page shows it; beginners need public names alone."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import discreet

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """docs/hooks/notebook_page.py, which is no package."""
    spec = importlib.util.spec_from_file_location("notebook_page", ROOT / "docs" / "hooks" / "notebook_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_cell_in_order(tool: ModuleType) -> None:
    text, at = tool.PAGE.read_text(), 0
    for cell in tool.nbformat.read(tool.NOTEBOOK, as_version=4).cells:
        found = text.find(tool.source_of(cell), at)
        assert found >= 0, f"run python docs/hooks/notebook_page.py: the page lacks {cell.source[:60]!r}"
        at = found + len(cell.source)


def test_the_page_of_the_package_lists_what_the_package_has() -> None:
    listed = re.findall(r"^::: [\w.]+\.(\w+)$", (ROOT / "docs" / "api" / "discreet.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(discreet.__all__)
    assert all(getattr(discreet, name).__name__ == name for name in listed)


@pytest.mark.slow
def test_all_cells_run_and_end_within_the_budget(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    said = "\n".join(tool.said_by(cell) for cell in tool.executed().cells)
    assert "round 15/15" in said
    assert "epsilon user 8.000" in said
    assert "user -> all data of one client" in said
