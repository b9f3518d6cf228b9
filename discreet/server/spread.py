"""Public constants that match the spread of a table's numbers to that of its categories.

A public range is chosen to contain nearly all values, so it is taken as six standard deviations.
Under a clip norm, the scale of a column decides its share of the signal.
"""

from __future__ import annotations

import numpy as np

from discreet.data.columns import DATE, NUMBER
from discreet.data.description import DataDescription
from discreet.data.encoding import column_names
from discreet.settings.data import NormaliserConfig

DEVIATION = 1 / 3  # of a number, in halves of its public range
AS_NUMBER = (0.0, DEVIATION)
AS_IT_IS = (0.0, 1.0)
AS_FLAG = (-1.0, 2.0)  # -1 and 1 become 0 and 1
FLAG = (0.0, 1.0)  # the public range of a flag


def spread_of(description: DataDescription | None, width: int) -> NormaliserConfig:
    """The normaliser of a table with so many inputs: numbers and dates are divided by a third of
    half their public range; categories and flags stay 0 and 1. ValueError: the inputs have no
    ranges."""
    if description is not None and description.columns:
        found = _of_columns(description)
    elif description is not None and description.low is not None:
        lows = np.broadcast_to(np.asarray(description.low), width).tolist()
        highs = np.broadcast_to(np.asarray(description.high), width).tolist()
        found = [_of_range(low, high) for low, high in zip(lows, highs, strict=True)]
    else:
        raise ValueError("data.normalise=spread needs the public ranges of a table, in data.toml")
    means, deviations = (list(values) for values in zip(*found, strict=True))
    return NormaliserConfig(means, deviations)


def _of_columns(description: DataDescription) -> list[tuple[float, float]]:
    found = list[tuple[float, float]]()
    for column in description.columns:
        each = [AS_IT_IS] * len(column.outputs)
        if column.kind == DATE:
            each[0] = AS_NUMBER
        elif column.kind == NUMBER and not column.bins:
            each[0] = _of_range(column.low, column.high)
        found += each
    pairs = len(column_names(description.columns, description.pairs)) - len(found)
    return found + [AS_IT_IS] * pairs


def _of_range(low: object, high: object) -> tuple[float, float]:
    return AS_FLAG if (low, high) == FLAG else AS_NUMBER
