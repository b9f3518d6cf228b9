"""A disk that is full, or fails, interrupts a run in one line that goes on with it; nothing is left half made."""

from __future__ import annotations

import errno
import os
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from discreet.federated import run_folder

SETTINGS = ("data.num_clients=5", "model.name=logistic_regression", "rounds=3", "privacy.user.too_noisy=warn")


def full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def after_the_first_round(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From the second row of metrics.csv on, a file or the ledger finds no room."""
    replace, connect = run_folder.replace_file, sqlite3.connect

    def replace_until_full(path: Path, content: bytes, *, flush: bool = True) -> None:
        if path.name == name and (path.parents[1] / "run" / "metrics.csv").exists():
            raise full(path)
        replace(path, content, flush=flush)

    class Full(sqlite3.Connection):
        def executemany(self, *words: object) -> sqlite3.Cursor:
            pages = self.execute("pragma page_count").fetchone()[0]
            self.execute(f"pragma max_page_count = {pages}")
            self.execute("insert into facts values ('long', ?)", ("x" * 100_000,))
            raise AssertionError("it had room")

    if name == "ledger.db":
        monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Full))
    else:
        monkeypatch.setattr(run_folder, "replace_file", replace_until_full)
