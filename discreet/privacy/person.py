"""The key of a person, by which rows of one person are found in tables, splits, guards and loops.

Two people under one key would be protected as one, which costs accuracy; one person under two keys
would be protected as two halves. So spellings that may be one person's are a question to whoever
knows the table.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

EXACT = "exact"
FOLDED = "folded"
IDS = (EXACT, FOLDED)


class OtherSpelling(ValueError):
    """Two rows, counted from 0, whose owners may be one person. The message has no value."""

    def __init__(self, row: int, before: int) -> None:
        super().__init__(
            f"the owner is written almost as in row {before + 1}: they differ only by case, "
            "leading zeros or a trailing .0. If that is one person write "
            'ids = "folded", if they are two ids = "exact"'
        )
        self.row = row


def person_key(cell: object) -> str:
    """A cell as a key: in Unicode's form NFKC, with single spaces and none around; a whole number
    as its digits.

    >>> person_key(" Ann\u00a0 Lee "), person_key(12.0), person_key("012")
    ('Ann Lee', '12', '012')
    """
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return " ".join(unicodedata.normalize("NFKC", str(cell)).split())


def folded_key(key: str) -> str:
    """A key without case, leading zeros and a trailing .0.

    >>> [folded_key(key) for key in ("P-7a", "007", "7.0", "0", "A07")]
    ['p-7a', '7', '7', '0', 'a07']
    """
    folded = key.casefold()
    whole, point, rest = folded.partition(".")
    if whole.isdecimal() and (not point or not rest.strip("0")):
        return whole.lstrip("0") or "0"
    return folded


def person_keys(cells: Iterable[object], ids: str | None = None) -> list[str]:
    """The key of each row's owner. `ids`: EXACT or FOLDED if somebody has decided what spellings
    mean; None: two keys that fold to one are refused.

    Raises:
      OtherSpelling: such keys.
    """
    keys = [person_key(cell) for cell in cells]
    if ids == EXACT:
        return keys
    if ids == FOLDED:
        return [folded_key(key) for key in keys]
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        before = first.setdefault(folded_key(key), row)
        if keys[before] != key:
            raise OtherSpelling(row, before)
    return keys
