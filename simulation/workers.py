"""Where chunks of clients are trained: side by side in processes that share memory, or in a thread of this one.

A small model is a row of short calls, and threads would wait for Python's lock between them: two threads are slower
than one. Forked processes have the resident data set and the engine as they stand, without a copy; parameters and
updates pass through memory that all of them map.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strategies.exchange import Replies

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux

Work = TypeVar("Work")
Train = Callable[[Tensor, Work], Replies]
TrainAny = Callable[[Tensor, Any], Replies]


class Workers(Generic[Work]):
    """Trains pieces of work, several at a time, and gives the replies back in the order of the work.

    Args:
        train: of parameters (num_params,) and a piece of work, the replies. In a process it runs as it was when the
            worker was forked, so that work and replies' numbers are all that travels.
        count: how many at a time.
        rows: the most clients that a piece of work has.
        num_params: of the model.
        forked: whether each worker is a process. Otherwise one thread does everything.
    """

    def __init__(self, train: Train[Work], *, count: int, rows: int, num_params: int, forked: bool) -> None:
        self.count = count if forked else 1
        self._train = train
        self._waiting: deque[tuple[int | None, Future[Replies | _Told]]] = deque()
        self._pool: Executor
        self._params, self._slots = torch.empty(0), torch.empty(0)
        self._free: deque[int] = deque()
        self._forked = forked
        if forked:
            # One more than work: the replies of a piece are read while all workers have something to do.
            self._params, self._slots = _mapped(1, num_params)[0], _mapped(count + 1, rows, num_params)
            self._free.extend(range(count + 1))
            start = partial(_start, train, self._params, self._slots, os.getpid())
            self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=start)
        else:
            self._pool = ThreadPoolExecutor(1, "cohort", initializer=torch.set_num_threads, initargs=(1,))

    def begin(self, params: Tensor) -> None:
        """The parameters that work starts from, until the next call. What an earlier round left is given up."""
        self._give_up()
        if self._forked:
            self._params.copy_(params)
        else:
            self._params = params

    def submit(self, work: Work) -> None:
        """Begins a piece of work. At most `count` + 1 pieces may stand before `result` is called."""
        if not self._forked:
            self._waiting.append((None, self._pool.submit(self._train, self._params, work)))
            return
        slot = self._free.popleft()
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads. These children compute in one thread and take no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._waiting.append((slot, self._pool.submit(_train_into, slot, work)))

    @property
    def full(self) -> bool:
        """Whether a result has to be taken before more is submitted."""
        return len(self._waiting) > self.count

    @property
    def idle(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._waiting

    def result(self) -> Replies:
        """The replies of the oldest piece. Their updates may be overwritten by work that is submitted after."""
        slot, future = self._waiting.popleft()
        try:
            told = future.result()
        except BrokenProcessPool as error:
            raise RuntimeError("a worker process of the simulation was killed: is there enough memory?") from error
        finally:
            if slot is not None:
                self._free.append(slot)
        if isinstance(told, Replies):
            return told
        return told.replies(self._slots[slot, : len(told.below)])

    def close(self) -> None:
        """Ends the workers."""
        self._give_up()
        self._pool.shutdown()

    def _give_up(self) -> None:
        for _, future in self._waiting:
            future.cancel()
        wait([future for _, future in self._waiting])
        self._free.extend(slot for slot, _ in self._waiting if slot is not None)
        self._waiting.clear()


def can_fork() -> bool:
    """Whether this system has workers that are processes: Linux."""
    return hasattr(ctypes.CDLL(None), "prctl") and "fork" in multiprocessing.get_all_start_methods()


def _mapped(*shape: int) -> Tensor:
    """Float32 memory that processes forked later share; not in /dev/shm, which containers keep small."""
    memory = mmap.mmap(-1, 4 * math.prod(shape))
    return torch.from_numpy(np.frombuffer(memory, dtype=np.float32).reshape(shape))


@dataclass(frozen=True, eq=False)
class _Told:
    """Replies but for their updates, as they travel between processes: PyTorch would send a tensor by a file."""

    below: NDArray[np.bool_]
    epsilon_example: float
    epsilon_local: float
    epsilon_local_pure: float

    def replies(self, updates: Tensor) -> Replies:
        """With the updates again."""
        below = torch.from_numpy(self.below)
        return Replies(updates, below, self.epsilon_example, self.epsilon_local, self.epsilon_local_pure)


@dataclass(frozen=True, eq=False)
class _Forked:
    """What a worker process was forked with."""

    train: TrainAny
    params: Tensor
    slots: Tensor


_forked: list[_Forked] = []


def _start(train: TrainAny, params: Tensor, slots: Tensor, parent: int) -> None:
    """In a new worker: ends with its parent, however that ends, and leaves signals to it."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _forked.append(_Forked(train, params, slots))


def _train_into(slot: int, work: object) -> _Told:
    (forked,) = _forked
    replies = forked.train(forked.params, work)
    forked.slots[slot, : len(replies.updates)] = replies.updates
    return _Told(replies.below.numpy(), replies.epsilon_example, replies.epsilon_local, replies.epsilon_local_pure)
