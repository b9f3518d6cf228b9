"""Which of several trade-offs no other one beats."""

from __future__ import annotations

import math
from collections.abc import Sequence


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the (cost, value) points that no other point beats, by rising cost.

    A point is beaten by one that costs no more and is worth no less, and is better in one of the two. Equal points
    are both kept; points with a cost or a value that is not finite are left out.

    >>> frontier([(1.0, 0.7), (2.0, 0.6), (3.0, 0.9)])
    [0, 2]
    """
    usable = [index for index, point in enumerate(points) if all(map(math.isfinite, point))]
    kept: list[int] = []
    for index in sorted(usable, key=lambda index: (points[index][0], -points[index][1])):
        if not kept or points[index][1] > points[kept[-1]][1] or points[index] == points[kept[-1]]:
            kept.append(index)
    return kept
