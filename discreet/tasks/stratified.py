"""A stratified split, number for number that of scikit-learn's `train_test_split`, without the second of its import."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def stratified_split(targets: NDArray[Any], *, test_fraction: float, seed: int) -> tuple[Numbers, Numbers]:
    """The rows of the training and of the test set, each in random order, with every class in its share of both.

    targets: (n,). The test set has ceil(test_fraction * n) rows. The same seed gives the same split everywhere: NumPy
    keeps the stream of RandomState fixed. Source: `StratifiedShuffleSplit` of scikit-learn 1.5.
    """
    random = np.random.RandomState(seed)
    _, classes, counts = np.unique(targets, return_inverse=True, return_counts=True)
    tests = math.ceil(test_fraction * len(targets))
    in_train = _shares(counts, len(targets) - tests, random)
    in_test = _shares(counts - in_train, tests, random)
    train, test = [], []
    for members, first, second in zip(
        np.split(np.argsort(classes, kind="stable"), np.cumsum(counts)[:-1]), in_train, in_test, strict=True
    ):
        order = members[random.permutation(len(members))]
        train.append(order[:first])
        test.append(order[first : first + second])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(test))


def _shares(counts: Numbers, total: int, random: np.random.RandomState) -> Numbers:
    """`total` places over classes of these sizes: rounded down, and the rest to the largest remainders, ties drawn."""
    exact = counts / counts.sum() * total
    shares: Numbers = np.floor(exact).astype(np.int64)
    remainders = exact - shares
    for value in np.unique(remainders)[::-1]:
        left = total - int(shares.sum())
        if left <= 0:
            break
        equal = np.flatnonzero(remainders == value)
        shares[random.choice(equal, size=min(len(equal), left), replace=False)] += 1
    return shares
