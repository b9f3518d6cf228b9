"""A messy table of a hospital like none that exists: semicolons, decimal commas, empty cells,
words, dates, and several visits a patient."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path

HEAD = "patient_id;visit_date;age;sex;ward;hba1c;note;readmitted"
TOML = """format = "csv"
file = "train.csv"
test = "test.csv"
target = "readmitted"
classes = ["no", "yes"]
owner = "patient_id"
decimal = ","

[columns]
age = [0, 100]
sex = ["F", "M"]
ward = { kind = "category", levels = ["cardiology", "surgery", "emergency"], missing = "category" }
hba1c = { kind = "number", low = 3, high = 14, missing = "middle", curves = 3 }
visit_date = { kind = "date", low = 2022-01-01, high = 2024-12-31, format = "%d.%m.%Y" }
[[pairs]]
columns = ["age", "sex"]
"""

# Of hospitals that agree, without columns.
HOSPITALS_TOML = """\
format = "csv"
file = "train.csv"
test = "test.csv"
target = "returned"
owner = "pid"
classes = ["no", "yes"]
[columns]
"""


def write_hospital(folder: Path, columns: str, tables: Mapping[str, Sequence[str]]) -> Path:
    """A folder with data.toml, in which the lines under [columns] are given, and with CSV files by
    name."""
    folder.mkdir(exist_ok=True)
    (folder / "data.toml").write_text(HOSPITALS_TOML + columns)
    for name, lines in tables.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def rows_of(people: int, *, first: int = 0, seed: int = 40127) -> list[str]:
    """The visits of so many patients: 10 % are readmitted, by age, ward and HbA1c."""
    draws, rows = random.Random(seed + first), []
    for person in range(first, first + people):
        age, sex = draws.randint(18, 95), draws.choice("FM")
        ward = draws.choice(["cardiology", "surgery", "emergency", ""])
        for _ in range(1 + min(int(draws.expovariate(0.5)), 9)):
            level = "" if draws.random() < 0.15 else round(draws.gauss(6, 1.1), 1)
            score = -5.6 + 0.045 * age + 0.9 * ((level or 6) - 6) + (ward == "emergency")
            label = "yes" if draws.random() < 1 / (1 + math.exp(-score)) else "no"
            day = (date(2022, 1, 1) + timedelta(days=draws.randint(0, 900))).strftime("%d.%m.%Y")
            said, note = str(level).replace(".", ","), f"seen {draws.randint(1, 10**6)}"
            rows.append(f"P{person:05d};{day};{age};{sex};{ward};{said};{note};{label}")
    return rows


def write_table(path: Path, people: int, *, first: int = 0) -> Path:
    """A CSV file of so many patients, with a byte order mark."""
    path.write_text("\n".join([HEAD, *rows_of(people, first=first)]) + "\n", encoding="utf-8-sig")
    return path


def make_project(folder: Path, *, people: int, tested: int = 40) -> Path:
    """A folder with a training table, a test table of other patients, and data.toml."""
    write_table(folder / "train.csv", people)
    write_table(folder / "test.csv", tested, first=people)
    (folder / "data.toml").write_text(TOML)
    return folder
