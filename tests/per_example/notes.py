"""What models and losses of tests note."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any


class Notes:
    """Things that were seen. Not in a list, since what a forward or a loss writes into one is
    undone after each pass."""

    def __init__(self) -> None:
        self._told = SimpleQueue[Any]()

    def note(self, value: Any) -> Any:
        self._told.put(value)
        return value

    def taken(self) -> list[Any]:
        """What was noted since the last time."""
        return [self._told.get() for _ in range(self._told.qsize())]
