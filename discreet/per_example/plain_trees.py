"""Tables of plain Python values, such as a vocabulary: all of a table is compared at once, so that
one with thousands of lists costs a step little."""

from __future__ import annotations

import marshal
from typing import Any

from discreet.per_example.held_values import PLAIN, is_fixed, refill

_CONTAINERS = frozenset((dict, list, tuple, set, frozenset))
_PLAIN = frozenset(PLAIN)
_BY_VALUE = 2  # the format of marshal in which equal values have equal bytes
_MOST_PARTS = 2**16


class PlainTree:
    """A container that holds plain values and other such containers alone, as it is now."""

    def __init__(self, name: str, value: Any) -> None:
        """Raises ValueError: it holds something else, or too many containers."""
        self.name = name
        self._value = value
        self._parts = _parts_of(value)
        self._before = self.read()
        if type(self._before) is not bytes:
            raise ValueError("a container is too deep")

    @property
    def is_constant(self) -> bool:
        """True if nothing in it can be replaced."""
        return not self._parts

    def read(self) -> Any:
        """All values as bytes, also the order of dictionaries; the container itself if it holds
        something that is not plain by now."""
        try:
            return marshal.dumps(self._value, _BY_VALUE)
        except ValueError:
            return self._value

    def is_unchanged(self) -> bool:
        """True if it holds the same values as before."""
        now = self.read()
        return type(now) is bytes and now == self._before

    def restore(self) -> bool:
        """Undoes changes: each container gets the objects that it held. True if there were some."""
        if self.is_unchanged():
            return False
        for container, entries in self._parts:
            refill(container, entries)
        return True


def _parts_of(value: Any) -> list[tuple[Any, Any]]:
    """The containers in a container, and it itself, that can be written to, with copies of their
    entries."""
    found = list[tuple[Any, Any]]()
    waiting = [value]
    seen = set[int]()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        if type(container) not in _CONTAINERS or len(found) == _MOST_PARTS:
            raise ValueError("not plain")
        if is_fixed(container):
            entries = container
        else:
            entries = container.copy()
            found.append((container, entries))
        if isinstance(entries, dict):
            waiting += _not_plain(entries.keys())
            entries = entries.values()
        waiting += _not_plain(entries)
    return found


def _not_plain(entries: Any) -> list[Any]:
    if _PLAIN.issuperset(map(type, entries)):
        return []
    return [each for each in entries if type(each) not in _PLAIN]
