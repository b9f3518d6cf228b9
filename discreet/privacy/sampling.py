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


def poisson_cohort(node_ids: Sequence[int], probability: float, source: RandomSource) -> list[int]:
    """The nodes that take part in a round, each independently with `probability`, in the order of
    `node_ids`; may be empty.

    Add-or-remove-one adjacency: a node's presence does not change the chances of the others, so
    that amplification by Poisson sampling holds. Raises ValueError if a node appears twice.
    """
    _check_distinct(node_ids)
    chosen = poisson_sample(len(node_ids), probability=probability, source=source)
    return [node_ids[index] for index in chosen.tolist()]


def fixed_size_cohort(node_ids: Sequence[int], cohort_size: int, source: RandomSource) -> list[int]:
    """`cohort_size` different nodes, every such set equally likely, in random order.

    Replace-one adjacency. The sensitivity of the clipped sum is 2C, not C: one node leaves and
    another comes. Raises ValueError if a node appears twice, or if there are fewer nodes: each
    would have a larger chance than was accounted for."""
    _check_distinct(node_ids)
    if not 0 <= cohort_size <= len(node_ids):
        raise ValueError(
            f"cohort_size must be in [0, {len(node_ids)}], the number of nodes, not {cohort_size}"
        )
    return [node_ids[index] for index in source.permutation(len(node_ids))[:cohort_size].tolist()]


def in_turn(client: int, number: int, *, groups: int) -> bool:
    """True if round `number`, from 1 on, is a client's turn. A client's own number decides its
    group, regardless of the other clients, and each group has every `groups`-th round. There is no
    randomness and so no amplification: the account relies on the distance between turns."""
    return client % groups == (number - 1) % groups


def _check_distinct(node_ids: Sequence[int]) -> None:
    if not isinstance(node_ids, range) and len(set(node_ids)) != len(node_ids):
        raise ValueError("node_ids must be distinct: a node that appears twice would count twice")


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

        Raises:
          ValueError: more members than `population_size`, so the account would not match the
            run.
        """
        if len(members) > self.population_size:
            raise ValueError(
                f"sampling.population_size={self.population_size}, but {len(members)} "
                "clients are connected: delta, the denominator and the privacy "
                "account hold for the declared population only"
            )
        if self.kind in ("everyone", "cyclic"):
            return [member for member in members if in_turn(member, number, groups=self.groups)]
        if self.kind == "poisson":
            return poisson_cohort(members, self.probability, source)
        # Absent clients are drawn too and then missed, so each client's chance stays cohort_size /
        # population_size.
        places = range(self.population_size)
        chosen = fixed_size_cohort(places, round(self.probability * self.population_size), source)
        return [members[place] for place in chosen if place < len(members)]
