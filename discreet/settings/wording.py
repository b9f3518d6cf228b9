"""Messages about settings, in which each interface uses its own name for a setting.

A configuration uses keys, such as `sampling.probability`; `DPFedAvg` and `DPSGD` use their
arguments' names. Each interface has a dictionary from key to name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """The key of a setting in a message; or key and value, such as `sampling.kind=fixed`."""

    key: str

    def named(self, names: Mapping[str, str]) -> str:
        """An interface's name for it: for key and value together, or for the key."""
        if self.key in names:
            return names[self.key]
        key, mark, value = self.key.partition("=")
        return names.get(key, key) + mark + value

    def __str__(self) -> str:
        return self.key


class Wording:
    """A message of several parts: texts, keys, and messages. As a string it shows the keys."""

    def __init__(self, *parts: Phrase) -> None:
        self.parts = parts

    def named(self, names: Mapping[str, str]) -> str:
        """The message with the names of an interface."""
        return "".join(in_words(part, names) for part in self.parts)

    def __str__(self) -> str:
        return self.named({})


Phrase = str | Key | Wording


def joined(separator: str, parts: Iterable[Phrase]) -> Wording:
    """The parts, with a separator between them."""
    found: list[Phrase] = []
    for part in parts:
        found += (separator, part)
    return Wording(*found[1:])


def in_words(said: object, names: Mapping[str, str]) -> str:
    """The text of a message, or of an error with one, with the names of an interface."""
    if isinstance(said, BaseException) and said.args:
        return in_words(said.args[0], names)
    if isinstance(said, Key | Wording):
        return said.named(names)
    return str(said)
