"""Which processes live that a test has started: each carries a mark in its environment, or is below one that does."""

from __future__ import annotations

from pathlib import Path

from scripts.processes import below

MARK = "DISCREET_TEST_MARK"


def marked(mark: str, *, program: str = "") -> list[int]:
    """The living processes of a mark, or those of them that run a program."""
    found = set()
    for pid in below(0, program.encode()):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:
            continue  # it has ended in the meantime
    return sorted(found)
