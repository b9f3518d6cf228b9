"""Rows that repeat earlier ones, as in an export that was appended twice or by oversampling: copies
of a person's row count several times in a sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

_FEWEST = 2  # rows that repeat earlier ones
_KINDS = 16  # different rows, below which nothing is said
_MOST = 1.5  # pairs of rows that are equal in a half, for each pair that is equal in all
_APART = 32  # of so many pairs of rows at most one is equal in the other half


def repeated_rows(
    one: Sequence[Hashable], other: Sequence[Hashable]
) -> tuple[int, int, int] | None:
    """The positions of a row and of its first copy, and how many rows repeat an earlier one; None
    if there are no copies. `one`, `other`: what each row has in every second column, and in the
    others. Rows that are equal by chance in one half are seldom equal in the other; copies always
    are."""
    rows = list(zip(one, other, strict=True))
    first = dict[Hashable, int]()
    earlier = [first.setdefault(row, at) for at, row in enumerate(rows)]
    copies = len(rows) - len(first)
    if copies < _FEWEST or len(first) < _KINDS:
        return None
    fewer, more = sorted((_equal_pairs(one), _equal_pairs(other)))
    pairs = len(rows) * (len(rows) - 1) // 2
    if fewer > _MOST * _equal_pairs(rows) or more * _APART > pairs:
        return None
    at = next(row for row, same in enumerate(earlier) if same != row)
    return earlier[at], at, copies


def _equal_pairs(values: Sequence[Hashable]) -> int:
    return sum(times * (times - 1) // 2 for times in Counter(values).values())
