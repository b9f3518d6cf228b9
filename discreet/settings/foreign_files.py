"""Files that others have made. Each error of a library that reads them becomes one line with the
file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST = 200  # characters of a library's own words


@contextmanager
def one_line(
    path: Path | str, kind: type[ValueError], what: str = "can't be read"
) -> Iterator[None]:
    """Turns every error about a file into a `kind` whose message is the file, `what`, and the
    reason. Only what reads the file belongs into the block: on a damaged file numpy, zipfile,
    pyarrow and others raise nearly every error there is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, kind) and str(error).startswith(str(path)):
            raise
        raise kind(f"{path} {what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8, at byte {error.start}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # pyarrow shows the row after this word
    said, _, _ = " ".join(str(error).split()).partition(", got ")
    return said[:LONGEST] or type(error).__name__


def read_text(path: Path, kind: type[ValueError], what: str = "can't be read") -> str:
    """The text of a file in UTF-8, without the mark that Windows begins one with. Raises `kind`."""
    with one_line(path, kind, what):
        return path.read_text(encoding="utf-8-sig")


def read_toml(path: Path, kind: type[ValueError], what: str = "is not TOML") -> dict[str, Any]:
    """The content of a TOML file. Raises `kind`."""
    text = read_text(path, kind)
    with one_line(path, kind, what):
        return tomllib.loads(text)


def read_json_file(path: Path, kind: type[ValueError], what: str = "is not JSON") -> Any:
    """The content of a JSON file. Raises `kind`."""
    text = read_text(path, kind)
    with one_line(path, kind, what):
        return json.loads(text)
