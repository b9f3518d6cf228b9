"""Who holds what of the demonstration data, as a configuration says it."""

from __future__ import annotations

from discreet.settings import DataConfig
from discreet.tasks.partition import Partition


def partition_of(data: DataConfig) -> Partition:
    """The partition of a run's data section."""
    return Partition(data.num_clients, data.partition, data.partition_seed, data.alpha, data.examples_per_client)
