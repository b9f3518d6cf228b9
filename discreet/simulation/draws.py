"""Random draws for many virtual clients at once: the orders of their examples, their Poisson batches, their noise.

With a seed every client draws from its own streams, the very ones that it would draw from by itself. Without one,
nobody can repeat a draw, and one secure stream serves all of them in bulk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import poisson_sample
from discreet.simulation.client_examples import Numbers
from discreet.training.local_training import epoch_order, step_batch, step_noise


@dataclass(frozen=True, eq=False)
class SeededDraws:
    """One source a client: the numbers are those of `discreet.training.local_training` for the same source.

    Rows are clients; those that draw come first, so `sizes` may name fewer than there are.
    """

    sources: Sequence[RandomSource]

    def permutations(self, sizes: Numbers, *, epoch: int) -> Numbers:
        """A random order of each client's examples, (k, largest size), 0 beyond a client's size."""
        orders = np.zeros((len(sizes), max(sizes, default=0)), dtype=np.int64)
        for row, size in enumerate(sizes.tolist()):
            orders[row, :size] = epoch_order(self.sources[row], epoch, size).numpy()
        return orders

    def batches(self, sizes: Numbers, probabilities: Sequence[float], *, step: int) -> tuple[Numbers, Numbers]:
        """Poisson batches: clients and positions of the examples that are in, both (m,), ascending by client."""
        found = []
        for source, size, probability in zip(self.sources, sizes.tolist(), probabilities, strict=False):
            found.append(step_batch(source, step, size, probability=probability).numpy())
        clients = np.repeat(np.arange(len(found)), [len(positions) for positions in found])
        return clients, _concatenated(found)

    def add_noise(self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int) -> Tensor:
        """Each row of `totals` (k, d) plus its own noise for `sensitivity`."""
        noised = torch.empty_like(totals)
        for row, mechanism in enumerate(mechanisms[: len(totals)]):
            noised[row] = mechanism.add_noise(totals[row], sensitivity, step_noise(self.sources[row], step))
        return noised

    def local(self, row: int) -> RandomSource:
        """The source of a client's local mechanism."""
        return self.sources[row].child("local")


@dataclass(frozen=True, eq=False)
class SecureDraws:
    """`SeededDraws` from one secure source. Clients of equal size, and of equal noise, are drawn for in one go."""

    source: RandomSource

    def __post_init__(self) -> None:
        if not self.source.is_secure:
            raise ValueError("source must be secure: with a seed every client draws from streams of its own")

    def permutations(self, sizes: Numbers, *, epoch: int) -> Numbers:
        """Each order is uniform: see `RandomSource.permutation`."""
        orders = np.zeros((len(sizes), max(sizes, default=0)), dtype=np.int64)
        for start, stop in _runs(sizes):
            size = int(sizes[start])
            orders[start:stop, :size] = self._orders(stop - start, size)
        return orders

    def _orders(self, count: int, size: int) -> Numbers:
        while True:
            words = self.source.words(count * size).reshape(count, size)
            orders: Numbers = np.argsort(words, axis=1)
            ranked = np.take_along_axis(words, orders, axis=1)
            # Two equal words, once in 10^15 draws: all are drawn anew, so that no order is likelier than another.
            if not (ranked[:, 1:] == ranked[:, :-1]).any():
                return orders

    def batches(self, sizes: Numbers, probabilities: Sequence[float], *, step: int) -> tuple[Numbers, Numbers]:
        clients, positions = [], []
        for start, stop in _runs(sizes):
            size = int(sizes[start])
            chosen = poisson_sample((stop - start) * size, probability=probabilities[start], source=self.source).numpy()
            clients.append(start + chosen // max(size, 1))
            positions.append(chosen % max(size, 1))
        return _concatenated(clients), _concatenated(positions)

    def add_noise(self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int) -> Tensor:
        if all(mechanism == mechanisms[0] for mechanism in mechanisms[: len(totals)]):
            return mechanisms[0].add_noise(totals, sensitivity, self.source) if len(totals) else totals
        rows = [
            mechanism.add_noise(row, sensitivity, self.source)
            for row, mechanism in zip(totals, mechanisms, strict=False)
        ]
        return torch.stack(rows)

    def local(self, row: int) -> RandomSource:
        return self.source


Draws = SeededDraws | SecureDraws


def _runs(sizes: Numbers) -> Iterator[tuple[int, int]]:
    """(start, stop) of each stretch of equal sizes."""
    if not len(sizes):
        return iter(())
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return pairwise(edges)


def _concatenated(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
