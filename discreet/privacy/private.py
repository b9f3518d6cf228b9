"""A type for what must not be shown."""

from __future__ import annotations


class Private:
    """What holds people's values before their noise. Its text has none of them, so that a log line,
    an error or a report that is given one tells nothing."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: private>"
