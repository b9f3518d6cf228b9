"""Poisson samples, and the cohort of a round: a Poisson sample of the nodes, or a set of a fixed
size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from discreet.privacy.randomness import CHUNK, RandomSource


def poisson_sample(count: int, *, probability: float, source: RandomSource) -> Tensor:
    """A Poisson sample of the indices in [0, count), each included independently with
    `probability`; int64, ascending, may be empty.

    An index is included if its 64-bit word is below floor(probability * 2^64). So its chance is
    never above `probability`, equal to it from 2^-11 up, and less than 2^-64 below it otherwise.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], not {probability}")
    if probability == 1:
        return torch.arange(count)
    threshold = np.uint64(int(probability * 2**64))
    # In pieces, so that a population of a million takes only the memory of its sample.
    pieces = [
        start + np.flatnonzero(source.words(min(CHUNK, count - start)) < threshold)
        for start in range(0, count, CHUNK)
    ]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *pieces]))


def fixed_size_sample(count: int, *, size: int, source: RandomSource) -> Tensor:
    """`size` different indices in [0, count), every such set equally likely; int64, in random
    order.

    Replace-one adjacency. The sensitivity of the clipped sum is 2C, not C: one client leaves and
    another comes. Raises ValueError if there are fewer indices: each would have a larger chance
    than was accounted for.
    """
    if not 0 <= size <= count:
        raise ValueError(f"size must be in [0, {count}], not {size}")
    return source.permutation(count)[:size]


def in_turn(client: int, number: int, *, groups: int) -> bool:
    """True if round `number`, from 1 on, is a client's turn. A client's own number decides its
    group, regardless of the other clients, and each group has every `groups`-th round. There is no
    randomness and so no amplification: the account relies on the distance between turns."""
    return client % groups == (number - 1) % groups


@dataclass(frozen=True)
class CohortSampling:
    """The sampling of a round's cohort.

    kind: `poisson`: each member with `probability`, independently; `fixed`: that share of
    `population_size` places without replacement; only connected clients can be asked;
    `everyone`; `cyclic`: `groups` groups in turn. `population_size` is a public constant.
    """

    kind: str
    probability: float
    population_size: int
    groups: int = 1

    def draw(self, members: Sequence[int], source: RandomSource, *, number: int = 1) -> list[int]:
        """The cohort of round `number`, from 1 on, of the connected members; may be empty.

        A member's presence does not change the chances of the others, which amplification by
        sampling relies on.

        Raises:
          ValueError: a member appears twice, or there are more than `population_size`, so the
            account would not match the run.
        """
        if not isinstance(members, range) and len(set(members)) != len(members):
            raise ValueError(
                "members must be distinct: a client that appears twice would count twice"
            )
        if len(members) > self.population_size:
            raise ValueError(
                f"sampling.population_size={self.population_size}, but {len(members)} "
                "clients are connected: delta, the denominator and the privacy "
                "account hold for the declared population only"
            )
        if self.kind in ("everyone", "cyclic"):
            return [member for member in members if in_turn(member, number, groups=self.groups)]
        if self.kind == "poisson":
            chosen = poisson_sample(len(members), probability=self.probability, source=source)
        else:
            # Absent clients are drawn too and then missed, so each client's chance stays size /
            # population_size.
            size = round(self.probability * self.population_size)
            places = fixed_size_sample(self.population_size, size=size, source=source)
            chosen = places[places < len(members)]
        return [members[index] for index in chosen.tolist()]
