"""Made-up data: measurements of 300 people's wristbands in 8 minutes each, and their activity:
rest, walk or run.

`python examples/own/make_data.py` wrote train.csv, and test.csv with 60 other people, who are
public.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

COLUMNS = ("person", "steps", "swing", "pulse", "warmth", "activity")
# For each activity: steps a minute, swing of the arm (g), pulse, skin temperature (Celsius).
MEANS = {"rest": (5, 0.1, 70, 32.5), "walk": (95, 0.5, 95, 33.0), "run": (150, 1.1, 135, 34.0)}
MINUTE = (20, 0.2, 12, 0.5)  # standard deviations from minute to minute
PERSON = (12, 0.1, 12, 0.7)  # and from person to person
LOW, HIGH = (0, 0, 40, 28), (200, 2, 200, 38)  # the range of a wristband, as in data.toml
SEED = 52361


def rows(people: range, draw: np.random.Generator) -> list[list[object]]:
    """Eight minutes of each person."""
    found: list[list[object]] = []
    for person in people:
        own = draw.normal(0, PERSON)
        for activity in draw.choice(list(MEANS), size=8):
            values = np.clip(
                np.array(MEANS[str(activity)]) + own + draw.normal(0, MINUTE), LOW, HIGH
            )
            found.append([person, *(round(float(value), 2) for value in values), str(activity)])
    return found


def write(path: Path, table: list[list[object]]) -> None:
    """A CSV file with a header."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *table])


if __name__ == "__main__":
    folder, source = Path(__file__).resolve().parent, np.random.default_rng(SEED)
    write(folder / "train.csv", rows(range(300), source))
    write(folder / "test.csv", rows(range(1000, 1060), source))
