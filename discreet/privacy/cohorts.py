"""Who takes part in a round: Poisson cohorts, and cohorts of a fixed size. For the server alone."""

from __future__ import annotations

from collections.abc import Sequence

from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import poisson_sample


def poisson_cohort(node_ids: Sequence[int], probability: float, source: RandomSource) -> list[int]:
    """The nodes that take part in a round, each independently with `probability`, in the order given; may be
    empty.

    Add-or-remove-one adjacency: a node's presence does not change the chances of the others. Poisson
    subsampling amplification holds (see `PoissonSampledDpEvent` of dp-accounting).

    Raises:
        ValueError: if a node appears twice, or probability is not in [0, 1].
    """
    _check_distinct(node_ids)
    chosen = poisson_sample(len(node_ids), probability=probability, source=source)
    return [node_ids[index] for index in chosen.tolist()]


def fixed_size_cohort(node_ids: Sequence[int], cohort_size: int, source: RandomSource) -> list[int]:
    """`cohort_size` different nodes, every such set equally likely, in random order.

    Replace-one adjacency. Sensitivity of the clipped sum is 2C, not C: one node leaves and another comes.

    Raises:
        ValueError: if a node appears twice, or cohort_size is not in [0, number of nodes]. A smaller
            population would give every node a larger chance than was accounted for.
    """
    _check_distinct(node_ids)
    if not 0 <= cohort_size <= len(node_ids):
        raise ValueError(f"cohort_size must be in [0, {len(node_ids)}], the number of nodes, not {cohort_size}")
    return [node_ids[index] for index in source.permutation(len(node_ids))[:cohort_size].tolist()]


def _check_distinct(node_ids: Sequence[int]) -> None:
    if not isinstance(node_ids, range) and len(set(node_ids)) != len(node_ids):
        raise ValueError("node_ids must be distinct: a node that appears twice would count twice")
