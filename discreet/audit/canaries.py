"""Canaries: units that an audit puts into a mechanism or leaves out, each by its own fair coin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.client_settings import ConfigError
from discreet.privacy.randomness import RandomSource


@dataclass(frozen=True, eq=False)
class Canaries:
    """k canaries, whose directions are k rows of one random orthonormal basis of the updates.

    The basis is the discrete cosine transform of a vector whose signs were flipped at random. Such rows point nowhere
    in particular, do not disturb each other, and need no memory: all inner products with a vector are one transform.

    Attributes:
      signs: (num_params,) float64 of -1 and 1, the flipped signs.
      rows: (k,) int64, which rows of the basis are in use; no two are the same.
      bits: (k,) bool, what each canary says of its norm.
      included: (k,) bool, how the coins fell.
    """

    signs: NDArray[np.float64]
    rows: NDArray[np.int64]
    bits: NDArray[np.bool_]
    included: NDArray[np.bool_]

    def direction(self, index: int) -> Tensor:
        """The unit vector of a canary, (num_params,), float64."""
        from scipy.fft import idct

        one = np.zeros(len(self.signs))
        one[self.rows[index]] = 1.0
        return torch.from_numpy(self.signs * idct(one, norm="ortho"))

    def along(self, vector: Tensor) -> NDArray[np.float64]:
        """The inner product of each canary's direction with `vector` (num_params,): (k,)."""
        from scipy.fft import dct

        products: NDArray[np.float64] = dct(self.signs * vector.double().numpy(), norm="ortho")[self.rows]
        return products


def draw_canaries(count: int, num_params: int, source: RandomSource) -> Canaries:
    """Canaries with random directions, random bits and fair coins.

    Raises:
      ConfigError: `count` is not within 1 .. num_params: there are no more orthogonal directions.
    """
    if not 1 <= count <= num_params:
        raise ConfigError(f"canaries must be within 1 .. {num_params}, the number of parameters (got {count})")
    rows = source.child("rows").permutation(num_params)[:count].numpy()
    signs = np.where(coins(num_params, source.child("signs")), 1.0, -1.0)
    return Canaries(signs, rows, coins(count, source.child("bits")), coins(count, source.child("coins")))


def coins(count: int, source: RandomSource) -> NDArray[np.bool_]:
    """`count` independent fair coins, (count,) bool."""
    fell: NDArray[np.bool_] = source.words(count) % 2 == 1
    return fell
