"""Four hospitals: the UCI heart disease data by hospital, prepared as FLamby's Fed-Heart-Disease
except for the scaling.

Janosi, Steinbrunn, Pfisterer and Detrano 1988, "Heart Disease", UCI Machine Learning Repository, CC
BY 4.0. The preparation is that of Ogier du Terrail et al. 2022 (FLamby, NeurIPS Datasets and
Benchmarks), section on Fed-Heart-Disease. FLamby then scales by each hospital's own mean and
deviation, which is an unaccounted release."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from discreet.data.examples import SHAPES, Examples, Task, concatenated, to_unit_box
from discreet.data.targets import Array

# In the order of the clients. The names are those of the files: processed.cleveland.data.
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# The range of each feature: (low, high) becomes (-1, 1), and values outside are clamped. They are
# constants from general medical knowledge of adults: years, mmHg at rest, mg/dl of cholesterol,
# maximal beats per minute, mm of ST depression. They do not depend on the data. A feature that is 0
# or 1 stays unchanged.
HEART_RANGES: dict[str, tuple[float, float]] = {
    "age": (20, 90),
    "sex": (-1, 1),
    "trestbps": (80, 200),
    "chol": (100, 400),
    "fbs": (-1, 1),
    "thalach": (60, 220),
    "exang": (-1, 1),
    "oldpeak": (0, 5),
    **dict.fromkeys(("cp_2", "cp_3", "cp_4", "restecg_1", "restecg_2"), (-1, 1)),
}
# the dropped columns are missing for most patients of three hospitals
_COLUMNS = 14
_DROPPED = (10, 11, 12)
_NUMBERS = (0, 1, 3, 4, 5, 7, 8, 9)  # columns that are features as they are, in the order above
# columns with one of several categories, and the categories without the first
_KINDS = (
    (2, (2, 3, 4)),
    (6, (1, 2)),
)
_READ = tuple(column not in _DROPPED for column in range(_COLUMNS))
_TRAIN_SHARE = 0.66
_SPLIT_SEED = 43
# fewest patients of each label for a stratified split: Switzerland has one without the disease
_FEWEST = 3


def train_and_test(labels: Array) -> tuple[Array, Array]:
    """The row numbers of a hospital's training part and of its test part, the same in every run."""
    from sklearn.model_selection import train_test_split

    if np.bincount(labels, minlength=2).min() >= _FEWEST:
        stratify = labels
    else:
        stratify = None
    sizes = {"train_size": _TRAIN_SHARE, "test_size": 1 - _TRAIN_SHARE}
    train, test = train_test_split(
        np.arange(len(labels)), **sizes, random_state=_SPLIT_SEED, stratify=stratify
    )
    return train, test


def patients(features: Array, labels: Array) -> Examples:
    """Patients in the form that a model reads: features in [-1, 1]."""
    inputs = to_unit_box(features, tuple(HEART_RANGES.values()))
    return Examples(torch.from_numpy(inputs).float(), torch.from_numpy(labels))


def read_hospital(file: Path) -> tuple[Array, Array]:
    """The patients in a hospital's file without missing values: raw features (n, 13) in the order
    of `HEART_RANGES`, and 1 for those with the disease. ValueError: the file is not such a
    table."""
    if not file.is_file():
        wanted = ", ".join(f"processed.{name}.data" for name in HOSPITALS)
        raise FileNotFoundError(
            f"data.path: {file} is missing; heart expects a folder with {wanted}"
        )
    rows = [row for line in file.read_text().splitlines() if (row := line.split(",")) != [""]]
    try:
        read = [[value for value, kept in zip(row, _READ, strict=True) if kept] for row in rows]
        table = np.array([row for row in read if "?" not in row], dtype=np.float64).reshape(
            -1, sum(_READ)
        )
    except ValueError as error:
        raise ValueError(
            f"data.path: {file} must have {_COLUMNS} comma-separated numbers or ? per line"
        ) from error
    kinds = [table[:, column] == kind for column, others in _KINDS for kind in others]
    return np.column_stack([table[:, list(_NUMBERS)], *kinds]), (table[:, -1] > 0).astype(np.int64)


def load_heart(path: str | None) -> Task:
    """Heart disease or none, from 13 features: 486 training patients, whose owners are the
    hospitals (199, 172, 30 and 85), and the hospitals' test parts (104, 89, 16 and 45) in the same
    order."""
    if path is None:
        raise ValueError(
            "data.path: heart is read from a folder with the four processed.*.data files of the "
            "UCI data"
        )
    parts = []
    for name in HOSPITALS:
        features, labels = read_hospital(Path(path).expanduser() / f"processed.{name}.data")
        parts.append([patients(features[rows], labels[rows]) for rows in train_and_test(labels)])
    train, test = (concatenated(list(tables)) for tables in zip(*parts, strict=True))
    owners = torch.repeat_interleave(
        torch.arange(len(parts)), torch.tensor([len(table) for table, _ in parts])
    )
    return Task("heart", replace(train, owners=owners), test, SHAPES["heart"])
