"""What a forward of a test notes beside its work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Notes:
    """Things that were seen. Not a plain list, since a global list that a forward names is put back
    after each pass."""

    seen: list[Any] = field(default_factory=list)

    def note(self, value: Any) -> Any:
        self.seen.append(value)
        return value
