"""Data sets by name. Each is a function of a path (or None) that returns a Task and imports
libraries when called.

Small data sets come with scikit-learn, so a first run needs no download.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from discreet.data.examples import SHAPES, Examples, Task, to_unit_box
from discreet.data.targets import Array
from discreet.settings.data import FOLDER
from discreet.settings.later import later

# The split is part of the data set: fixed, public and stratified by class if there are classes, the
# same in every run.
_TEST_FRACTION = 0.2
_SPLIT_SEED = 20937

# (low, high), mapped to [-1, 1], of each quantity measured on the nuclei: its mean, standard error
# and worst value. The ranges come from the public documentation of the data set, rounded; they are
# not statistics of the data.
_CELL_RANGES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "radius": ((5, 30), (0, 3), (5, 40)),
    "texture": ((5, 40), (0, 5), (10, 50)),
    "perimeter": ((40, 200), (0, 22), (50, 250)),
    "area": ((0, 2500), (0, 550), (0, 4000)),
    "smoothness": ((0.05, 0.17), (0, 0.03), (0.07, 0.23)),
    "compactness": ((0, 0.35), (0, 0.14), (0, 1)),
    "concavity": ((0, 0.45), (0, 0.4), (0, 1.25)),
    "concave points": ((0, 0.2), (0, 0.05), (0, 0.3)),
    "symmetry": ((0.1, 0.3), (0, 0.08), (0.15, 0.65)),
    "fractal dimension": ((0.05, 0.1), (0, 0.03), (0.05, 0.2)),
}
# In the order of the columns: ten means, ten standard errors, ten worst values.
BREAST_CANCER_RANGES = tuple(ranges[part] for part in range(3) for ranges in _CELL_RANGES.values())


# As above, rounded, for the data set's ten features; sex is 1 or 2.
DIABETES_RANGES = (
    (18, 80),
    (1, 2),
    (15, 45),
    (60, 140),  # age, sex, body mass index, blood pressure
    (90, 310),
    (40, 250),
    (20, 100),
    (1, 10),
    (3, 6.5),
    (50, 130),  # six blood measurements
)
# the number of synthetic examples, and their seed
_LABELLED = 1500
_LABEL_SEED = 40813


def load_digits(path: str | None) -> Task:
    """Handwritten digits of scikit-learn: 1797 images (1, 8, 8) in [0, 1], 10 classes; no
    `path`."""
    from sklearn.datasets import load_digits as load

    inputs, targets = load(return_X_y=True)
    return _split("digits", path, (inputs / 16.0).reshape(-1, 1, 8, 8), targets)


def load_breast_cancer(path: str | None) -> Task:
    """Breast cancer Wisconsin of scikit-learn: 569 examples of 30 features, 2 classes (1 is
    benign), scaled by `BREAST_CANCER_RANGES`, public constants, and clamped to [-1, 1]; no `path`.
    """
    from sklearn.datasets import load_breast_cancer as load

    inputs, targets = load(return_X_y=True)
    return _split("breast_cancer", path, to_unit_box(inputs, BREAST_CANCER_RANGES), targets)


def load_diabetes(path: str | None) -> Task:
    """Diabetes of scikit-learn: 442 patients, 10 features, and one number, the progression of the
    disease a year later.

    Features are scaled by `DIABETES_RANGES`, and the number, in 0..400, to -1..1: public constants.
    scikit-learn's own scaling is computed from the data. No `path`.
    """
    from sklearn.datasets import load_diabetes as load

    features, values = load(return_X_y=True, scaled=False)
    target = SHAPES["diabetes"].target.scaled(torch.from_numpy(values[:, None])).numpy()
    return _split("diabetes", path, to_unit_box(features, DIABETES_RANGES), target)


def load_multilabel(path: str | None) -> Task:
    """Synthetic documents of scikit-learn's `make_multilabel_classification`, equal at every call:
    1500 counts of 20 words each, and the subset of 5 topics that they are about. Counts are divided
    by 10 and clamped to 1."""
    from sklearn.datasets import make_multilabel_classification

    counts, labels = make_multilabel_classification(
        _LABELLED, n_features=20, n_classes=5, n_labels=2, random_state=_LABEL_SEED
    )
    return _split("multilabel", path, np.minimum(counts / 10, 1), labels.astype(np.float32))


def _split(name: str, path: str | None, inputs: Array, targets: Array) -> Task:
    from sklearn.model_selection import train_test_split

    if path is not None:
        raise ValueError(
            f"data.path: {name} comes with scikit-learn and takes no path (got {path!r})"
        )
    classes = None
    kind = torch.float32
    if targets.ndim == 1:
        classes = targets
        kind = torch.int64
    parts = train_test_split(
        inputs, targets, test_size=_TEST_FRACTION, random_state=_SPLIT_SEED, stratify=classes
    )
    train_x, test_x, train_y, test_y = (
        torch.from_numpy(np.ascontiguousarray(part)) for part in parts
    )
    return Task(
        name,
        Examples(train_x.float(), train_y.to(kind)),
        Examples(test_x.float(), test_y.to(kind)),
        SHAPES[name],
    )


DATASETS: dict[str, Callable[[str | None], Task]] = {
    "digits": load_digits,
    "breast_cancer": load_breast_cancer,
    "mnist": later("discreet.data.images", "load_mnist"),
    "fashion_mnist": later("discreet.data.images", "load_mnist", name="fashion_mnist"),
    "cifar10": later("discreet.data.images", "load_cifar10"),
    "femnist": later("discreet.data.images", "load_femnist"),
    "shakespeare": later("discreet.data.text", "load_shakespeare"),
    "diabetes": load_diabetes,
    "multilabel": load_multilabel,
    "heart": later("discreet.data.heart", "load_heart"),
    FOLDER: later("discreet.data.folder", "load_folder"),
}


def load_task(name: str, *, path: str | None = None) -> Task:
    """The data set `name`, from `path` if it reads local files. It is loaded once per process, and
    anew if a file in that folder has changed.

    Raises ValueError: an unknown name, or a path that the data set does not take.
    FileNotFoundError: the named files are missing.
    """
    return loaded(name, path, _stamps(path))


def _stamps(path: str | None) -> tuple[tuple[str, int, int], ...]:
    """The path, the time of the last change and the size of each file in a folder."""
    if path is None or not (folder := Path(path).expanduser().resolve()).is_dir():
        return ()
    files = [(str(each), each.stat()) for each in folder.iterdir()]
    return tuple(sorted((name, about.st_mtime_ns, about.st_size) for name, about in files))


@lru_cache(maxsize=4)
def loaded(name: str, path: str | None, _: object) -> Task:
    """See `load_task`."""
    if name not in DATASETS:
        raise ValueError(
            f"data.name: there is no data set {name!r}; known are {', '.join(sorted(DATASETS))}"
        )
    return DATASETS[name](path)
