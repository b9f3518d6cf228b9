"""The global generators of PyTorch's CPU, `random` and `numpy.random` while a data set is read.

Each item draws by a seed of its own, which follows from the step's secret key and the item's index.
So no item moves what another one draws, whatever it draws itself, and whether it is there or not.
A collate_fn has one seed for its batch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource
from discreet.privacy.row_words import RowWords


@dataclass(frozen=True, eq=False, repr=False)
class OwnSeeds(Private):
    """The seeds of a piece of a batch.

    Attributes:
      key: secret, of the step: 32 bytes.
      number: of the piece in its step.
      process: that reads it.
    """

    key: bytes
    number: int
    process: int

    def read(self, items: Any, positions: Sequence[int]) -> list[Any]:
        """Items, each read with its own seed."""
        found = list[Any]()
        for position, seed in zip(positions, self._seeds(positions, 0), strict=True):
            seed_generators(seed)
            found.append(items[position])
        return found

    def joined(self, join: Callable[[list[Any]], Any], examples: list[Any]) -> Any:
        """A batch of examples, made with a seed of its own."""
        seed_generators(*self._seeds([self.number], 1 + self.process))
        return join(examples)

    def _seeds(self, identities: Sequence[int], draw: int) -> list[int]:
        words = RowWords(self.key)(torch.tensor(identities), draw, 1)
        found: list[int] = words.squeeze(1).tolist()
        return found


def seeds_of_pieces(source: RandomSource, process: int) -> Iterator[OwnSeeds]:
    """The seeds of the pieces of a step, one after the other."""
    key = source.words(4).tobytes()
    return (OwnSeeds(key, number, process) for number in itertools.count())


def seed_generators(seed: int) -> None:
    """Seeds the global generators. PyTorch and NumPy have the same algorithm and take 32 bits: of a
    word each gets its own, so that they don't draw the same."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed((seed + (seed >> 32)) % 2**32)


def generator_states() -> tuple[object, ...]:
    """The states of the global generators, which can be compared."""
    numpy = np.random.get_state(legacy=False)["state"]
    of_torch = torch.get_rng_state().numpy().tobytes()
    return of_torch, random.getstate(), numpy["key"].tobytes(), numpy["pos"]


@contextmanager
def generators_kept() -> Iterator[None]:
    """A context after which the global generators are as before."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which the global generators are seeded; they are as before afterwards."""
    with generators_kept():
        seed_generators(seed)
        yield
