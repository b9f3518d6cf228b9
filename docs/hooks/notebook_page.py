"""Runs the notebook and writes it, with what it printed and drew, as a page: `python
docs/hooks/notebook_page.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOK = ROOT / "examples" / "notebooks" / "ten_minutes.ipynb"
PAGE = ROOT / "docs" / "guide" / "ten_minutes.md"
NOTE = (
    "This page is the notebook `examples/notebooks/ten_minutes.ipynb` with the output of one run."
)


def executed() -> Any:
    """The notebook after a run of all cells, in a kernel of its own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    return notebook


def source_of(cell: Any) -> str:
    """A cell on the page, without what it said."""
    return str(cell.source) if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"


def said_by(cell: Any) -> str:
    """What a cell printed, as one block; the run's folder is not the reader's.

    Of the lines of many rounds the first three and the last two stay."""
    printed = "".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.get("outputs", ())
    )
    lines = printed.replace("\r\n", "\n").strip("\n")  # a command of a cell has a terminal
    plain = re.sub(r"\x1b\[[\d;]*m", "", lines)
    text = re.sub(r"/\S+/run\b", "FOLDER/run", plain)
    text = re.sub(
        r"((?:round \d+/.*\n){3})(?:.*\n)+?((?:round .*\n){2})(?!round)", r"\1...\n\2", text
    )
    return text and f"```text\n{text}\n```"


def page(notebook: Any) -> str:
    """The whole page."""
    blocks = [text for cell in notebook.cells for text in (source_of(cell), said_by(cell)) if text]
    return "\n\n".join([blocks[0], NOTE, *blocks[1:]]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(executed()))
