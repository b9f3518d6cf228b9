"""Poisson samples: which of so many are in, each independently."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from discreet.privacy.randomness import CHUNK, RandomSource


def poisson_sample(count: int, *, probability: float, source: RandomSource) -> Tensor:
    """The indices in [0, count) that are in, each independently with `probability`; int64, ascending, may be
    empty.

    An index is in when its 64-bit word is below floor(probability * 2^64). So it is in with a chance that is
    never above `probability`, equal to it from 2^-11 up, and less than 2^-64 below it otherwise. The cost is
    one word per index.

    Raises:
        ValueError: if count < 0 or probability is not in [0, 1] (NaN is not).
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], not {probability}")
    if count < 0:
        raise ValueError(f"count must be >= 0, not {count}")
    if probability == 1:
        return torch.arange(count)
    threshold = np.uint64(int(probability * 2**64))
    # In pieces, so that a population of a million takes the memory of those who are drawn.
    pieces = [
        start + np.flatnonzero(source.words(min(CHUNK, count - start)) < threshold) for start in range(0, count, CHUNK)
    ]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *pieces]))
