"""Trains chunks of clients in parallel, in processes that share memory.

A small model makes many short calls, and threads would wait for Python's lock between them: two
threads are slower than one. Forked processes inherit the data set and the engine without a copy;
parameters and sums are in shared memory. Work is sent through pipes, which the caller itself writes
and reads: with an executor's threads, workers idled a third of the time.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import multiprocessing
import os
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import torch
from torch import Tensor

from discreet.mechanisms.sums import PartialReply
from discreet.simulation.processes import RunLostError

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
QUEUED = 2  # most pieces of work of a process: the current and the next one

Train = Callable[[Tensor, Any], PartialReply]
# Errors of training that are passed to the caller. On any other error a worker prints it and ends.
TOLD = (ValueError, ArithmeticError, LookupError, RuntimeError, MemoryError, OSError)
KILLED = (
    "a worker process of the simulation was killed: is there enough memory? If it failed, it has "
    "printed why"
)


class LocalWorkers:
    """A number of processes, forked at the first work, that return replies in the order of the
    work. They inherit `train`, so that only the work and the replies' numbers are sent."""

    def __init__(self, train: Train, *, count: int, num_params: int, sum_length: int) -> None:
        places = QUEUED * count + 1
        self._train = train
        self.count = count
        self._params = _mapped(num_params, dtype=torch.float32)
        self._slots = _mapped(places, sum_length, dtype=torch.float64)
        self._free = deque(range(places))
        self._processes: deque[tuple[BaseProcess, Connection]] = deque()
        self._waiting: deque[tuple[Connection, int]] = deque()

    def replies(self, params: Tensor, works: Iterable[Any]) -> Iterator[PartialReply]:
        """The replies of each piece of work, from the same initial parameters. Their sum is
        overwritten once the next ones are asked for. Unfinished work of an earlier round is
        dropped. Raises RunLostError: the process of a piece has ended."""
        while self._waiting:
            with suppress(*TOLD):
                self._result()
        self._params.copy_(params)
        for work in works:
            self._submit(work)
            if not self._free:
                yield self._result()
        while self._waiting:
            yield self._result()

    def _submit(self, work: Any) -> None:
        if not self._processes:
            self._processes.extend(self._fork() for _ in range(self.count))
        slot = self._free.popleft()
        # Round-robin, as chunks take about the same time.
        self._processes.append(self._processes.popleft())
        pipe = self._processes[-1][1]
        try:
            pipe.send((slot, work))
        except (EOFError, OSError) as error:
            raise RunLostError(KILLED) from error
        self._waiting.append((pipe, slot))

    def _result(self) -> PartialReply:
        pipe, slot = self._waiting.popleft()
        self._free.append(slot)
        try:
            told = pipe.recv()
        except (EOFError, OSError) as error:
            raise RunLostError(KILLED) from error
        if isinstance(told, Exception):
            raise told
        replies: PartialReply = told
        return replace(replies, values=self._slots[slot].view(replies.values.dtype))

    def close(self) -> None:
        """Ends the workers."""
        for worker, pipe in self._processes:
            pipe.close()
            worker.kill()
            worker.join()
        self._processes.clear()
        self._waiting.clear()

    def _fork(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        words = (self._train, self._params, self._slots, there, os.getpid())
        worker = context.Process(target=_serve, args=words, daemon=True)
        with warnings.catch_warnings():
            # Newer versions of Python warn about forks in a process with threads. These children
            # use one thread and take no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            worker.start()
        there.close()
        return worker, here


class Workers(Protocol):
    """`LocalWorkers` and `discreet.simulation.ray_cluster.RayWorkers`."""

    count: int

    def replies(self, params: Tensor, works: Iterable[Any]) -> Iterator[PartialReply]: ...

    def close(self) -> None: ...


def can_fork() -> bool:
    """True if this process may have workers: on Linux, unless it is a daemon, like the processes of
    a pool."""
    return (
        not multiprocessing.current_process().daemon
        and hasattr(ctypes.CDLL(None), "prctl")
        and "fork" in multiprocessing.get_all_start_methods()
    )


def _mapped(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that later forked processes share; not in /dev/shm, which is small in containers."""
    memory = mmap.mmap(-1, dtype.itemsize * math.prod(shape))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _serve(train: Train, params: Tensor, slots: Tensor, pipe: Connection, parent: int) -> None:
    """The loop of a worker. It ends with its parent, however that ends, which handles signals."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while True:
        slot, work = pipe.recv()
        try:
            replies = train(params, work)
        except TOLD as error:
            error.add_note("in a worker of the simulation:\n" + traceback.format_exc())
            pipe.send(error)
            continue
        values = replies.values
        slots[slot].view(values.dtype).copy_(values)
        # Without the values of the sum, only its type: PyTorch would send a tensor through a file.
        pipe.send(replace(replies, values=torch.empty(0, dtype=values.dtype)))
