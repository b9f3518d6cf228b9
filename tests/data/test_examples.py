"""Features by public ranges."""

from __future__ import annotations

import numpy as np

from discreet.data.examples import to_unit_box


def test_scaling_maps_each_public_range_to_the_ends_clamps_outside_and_depends_on_no_other_row() -> None:
    ranges = ((20.0, 90.0), (-1.0, 1.0))
    low, high = np.array(ranges).T
    rows = np.stack([low - 1, low, (low + high) / 2, high, high * 3])
    scaled = to_unit_box(rows, ranges)
    assert np.allclose(scaled, np.array([-1, -1, 0, 1, 1])[:, None])
    assert np.array_equal(scaled, np.concatenate([to_unit_box(row[None], ranges) for row in rows]))
