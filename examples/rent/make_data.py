"""Made-up data: the rent of 400 flats of 40 landlords, who keep their books private.

`python examples/rent/make_data.py` wrote train.csv, and test.csv with 200 other flats, whose rents
are public.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

COLUMNS = ("landlord", "size", "rooms", "floor", "minutes", "rent")
SEED = 61333


def rows(landlords: range, flats: int, draw: np.random.Generator) -> list[list[object]]:
    """The flats of each landlord: size (square metres), rooms, floor, minutes to the centre, rent
    (euros a month)."""
    found: list[list[object]] = []
    for landlord in landlords:
        for size in draw.uniform(25, 130, flats):
            rooms, floor, minutes = (
                1 + int(size // 28),
                int(draw.integers(0, 8)),
                int(draw.integers(5, 50)),
            )
            rent = 250 + 11 * size + 12 * floor - 9 * minutes + draw.normal(0, 60)
            found.append(
                [landlord, round(float(size), 1), rooms, floor, minutes, round(float(rent))]
            )
    return found


def write(path: Path, table: list[list[object]]) -> None:
    """A CSV file with a header."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *table])


if __name__ == "__main__":
    folder, source = Path(__file__).resolve().parent, np.random.default_rng(SEED)
    write(folder / "train.csv", rows(range(40), 10, source))
    write(folder / "test.csv", rows(range(1000, 1020), 10, source))
