"""The key of a person, by which rows of one person are found in tables, splits, guards and loops.

Two people under one key would be protected as one, which costs accuracy; one person under two keys
would be protected as two halves. So spellings that may be one person's are a question to whoever
knows the table.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

EXACT = "exact"
FOLDED = "folded"
# How a choice of the two is written in data.toml, and with a command.
KEY = 'ids = "{}"'
OPTION = "--ids {}"
LARGEST_EXACT = 2.0**53  # beyond, float64 has no room for every whole number


SPELLINGS = "case, form, dashes, quotes, leading zeros, a trailing .0 or what is not seen"
# Beside those that can't be printed. U+2800 is a blank of Braille.
NOT_SEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
# Beside those of the category Pd: a minus, a modifier letter, and a hyphen bullet.
DASHES = "\u2212\u02d7\u2043"
QUOTES = "\u2018\u2019\u201b\u2032\u02b9\u02bc"
LEADING_ZEROS = re.compile(r"(?<![\d.,])0+(?=\d)")
TRAILING_ZERO = re.compile(r"(?<=\d)[.,]0+$")


class OtherSpelling(ValueError):
    """Two rows, counted from 0, whose owners may be one person. The message has no value. `choice`:
    KEY or OPTION."""

    def __init__(self, row: int, before: int, choice: str) -> None:
        super().__init__(
            f"the owner is written in two ways, which differ only by {SPELLINGS}. If that is one "
            f"person write {choice.format(FOLDED)}, if they are two {choice.format(EXACT)}"
        )
        self.row = row
        self.before = before


def person_key(cell: object, ids: str | None = None) -> str:
    """A cell as a key: in Unicode's form NFC, with single spaces and none around; a whole number as
    its digits. With EXACT a text is its own key, and with FOLDED `folded_key` of it.

    >>> person_key(" Ann\u00a0 Lee "), person_key(12.0), person_key("012")
    ('Ann Lee', '12', '012')
    >>> person_key("P7 ", EXACT), person_key("P7 ", FOLDED)
    ('P7 ', 'p7')
    """
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if ids == EXACT:
        return str(cell)
    key = " ".join(unicodedata.normalize("NFC", str(cell)).split())
    if ids == FOLDED:
        return folded_key(key)
    return key


def folded_key(key: str) -> str:
    """A key in the form NFKC, without case, characters that are not seen, zeros before a number, a
    trailing .0 or ,0, and spaces around; with one kind of dash and of single quote, and the digits
    of all scripts as those of ASCII.

    >>> [folded_key(key) for key in ("P\u201107a", "00\u200b7", "7,0", "0", "P\u00b2", "1.05")]
    ['p-7a', '7', '7', '0', 'p2', '1.05']
    """
    folded = unicodedata.normalize("NFKC", key).casefold()
    if not (folded.isascii() and folded.isprintable()):
        folded = "".join(map(_as_one_sees_it, NOT_SEEN.sub("", folded)))
    folded = TRAILING_ZERO.sub("", " ".join(folded.split()))
    return LEADING_ZEROS.sub("", folded)


def _as_one_sees_it(each: str) -> str:
    """A character without its variants; nothing for one that is not seen."""
    if not (each.isprintable() or each.isspace()):
        return ""
    if unicodedata.category(each) == "Pd" or each in DASHES:
        return "-"
    if each in QUOTES:
        return "'"
    return str(unicodedata.decimal(each, each))


def person_keys(cells: Iterable[object], ids: str | None = None, *, choice: str = KEY) -> list[str]:
    """The key of each row's owner. `ids`: EXACT or FOLDED if somebody has decided what spellings
    mean; None: two keys that fold to one are refused. `choice`: where it is decided, KEY or OPTION.

    Raises:
      OtherSpelling: such keys.
    """
    keys = [person_key(cell, ids) for cell in cells]
    if ids is not None:
        return keys
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        before = first.setdefault(folded_key(key), row)
        if keys[before] != key:
            raise OtherSpelling(row, before, choice)
    return keys
