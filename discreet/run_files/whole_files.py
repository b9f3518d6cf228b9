"""Files that are replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from discreet.ledger.rollback_guard import flush_folder
from discreet.logs import json_ready


def replace_file(path: Path, content: bytes, *, flush: bool = True, mode: int = 0o666) -> None:
    """Replaces a file as a whole. After a crash the old or the new content is there, provided that
    the new one was flushed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # a part of it, on a full disk
    if flush:
        flush_folder(path.parent)


def write_json(path: Path, facts: Mapping[str, Any]) -> str:
    """Replaces a file by facts and returns its text. Infinity is written as the string "inf", which
    every JSON reader accepts."""
    text = json.dumps(json_ready(facts), indent=2) + "\n"
    replace_file(path, text.encode())
    return text
