"""Trains chunks of clients on a Ray cluster: each chunk is a task, on whatever machine has a free CPU.

The data set, and all else that a task needs, is put into Ray's object store once. A machine has one copy of it, which
its processes map. Parameters are put there once a round. No state of a random generator travels: a task makes the
sources of its clients from the seed, or without a seed from the operating system where it runs. So a task that Ray
does again, after a process or a machine was lost, gives the same sum, or one with draws that nobody has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Generic

import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.mechanisms.sums import PartialReply
from discreet.settings.settings import RayConfig
from discreet.simulation.client_examples import read_only
from discreet.simulation.cohort import MakesWorkers
from discreet.simulation.ray_cluster import RayCluster, Task, connected, result
from discreet.simulation.workers import QUEUED, Train, Work

logger = logging.getLogger("discreet")


class RayWorkers(Generic[Work]):
    """Works as `discreet.simulation.workers.LocalWorkers` does, on a cluster. Results of an exact trainer come as
    they are done, others in the order of the work, so that a seed gives the same last bits each time.

    Args:
        trainer: as `discreet.simulation.cohort` has it; it is sent once to each machine.
        cluster: where they run.
        num_gpus: the share of a GPU that a task asks for.

    Raises:
        ConfigError: tasks ask for GPUs, and the cluster has none.
    """

    def __init__(self, trainer: Any, *, cluster: RayCluster, num_gpus: float = 0.0) -> None:
        self._cluster, self._num_gpus, self._is_exact = cluster, num_gpus, trainer.is_exact
        cluster.check_gpus(num_gpus)
        # In a container, so that a process fetches the trainer once, not each task.
        self._trainer = _Held(ray.put(trainer), "cuda" if num_gpus else "cpu")
        self._params: Task = ray.put(None)  # until work begins
        self._waiting: list[Task] = []
        self.count = 1

    def begin(self, params: Tensor) -> None:
        """Puts the parameters where every machine reads them, and uses the machines that have joined. For machines that
        are lost the cohort is cut as before, so that its sums do not depend on the loss."""
        self.close()
        self._cluster.check_nodes()
        cpus = self._cluster.cpus
        by_gpu = int(self._cluster.gpus / self._num_gpus) if self._num_gpus else cpus
        self.count = max(self.count, min(cpus, by_gpu))
        self._params = ray.put(params.cpu().numpy())

    def replies(self, works: Iterable[Work]) -> Iterator[PartialReply]:
        """The replies of each piece of work.

        Raises:
          RunLostError: the processes or machines that had one were lost, more than `RETRIES` times.
        """
        for work in works:
            self._waiting.append(
                self._cluster.start(_train, self._trainer, self._params, work, num_gpus=self._num_gpus)
            )
            if len(self._waiting) >= QUEUED * self.count:
                yield self._result()
        while self._waiting:
            yield self._result()

    def _result(self) -> PartialReply:
        done = ray.wait(self._waiting if self._is_exact else self._waiting[:1])[0][0]
        self._waiting.remove(done)
        replies: PartialReply
        replies, values = result(done, "a chunk of clients")
        return replace(replies, values=read_only(values))

    def close(self) -> None:
        """Ends the tasks that nobody waits for."""
        for task in self._waiting:
            ray.cancel(task)
        self._waiting.clear()


@dataclass(frozen=True)
class _Held:
    """The trainer in the object store, and where it is to train."""

    trainer: Task
    device: str


def _train(held: _Held, params: NDArray[Any], work: Any) -> tuple[PartialReply, NDArray[Any]]:
    """Replies without their sum, and the sum."""
    replies = _loaded(held)(torch.from_numpy(params.copy()), work)
    values = replies.values
    return replace(replies, values=torch.empty(0, dtype=values.dtype)), values.numpy()


@lru_cache(maxsize=1)
def _loaded(held: _Held) -> Train[Any]:
    return ray.get(held.trainer).on(held.device).replies  # type: ignore[no-any-return]


def workers_on_ray(asked: RayConfig, model: str, held: ExitStack) -> MakesWorkers:
    """Connects to the cluster of a run with a model until `held` ends, and gives what makes workers of it."""
    cluster = held.enter_context(connected(asked.address, models=[model]))
    logger.info("clients are trained on a Ray cluster with %d CPUs", cluster.cpus)
    return partial(RayWorkers, cluster=cluster, num_gpus=asked.num_gpus)
