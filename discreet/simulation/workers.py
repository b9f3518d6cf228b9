"""Trains chunks of clients side by side: in processes that share memory, or in a thread of this one.

A small model is a row of short calls, and threads would wait for Python's lock between them: two threads are slower
than one. Forked processes have the shared data set and the engine as they stand, without a copy; parameters and
sums pass through memory that all of them map. Work goes to them through pipes, written and read by the caller
itself: an executor's threads came too late, and workers idled a third of the time.
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from discreet.mechanisms.sums import PartialReply
from discreet.protocol.run_lost import RunLostError

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
QUEUED = 2  # pieces of work that a process has at most: one to do, and the next one

Work = TypeVar("Work", contravariant=True)
Train = Callable[[Tensor, Work], PartialReply]
# Errors of training that its caller is to see. A worker that meets anything else prints it and ends.
TOLD = (ValueError, ArithmeticError, LookupError, RuntimeError, MemoryError, OSError)
KILLED = "a worker process of the simulation was killed: is there enough memory? If it failed, it has printed why"


class ThreadWorker(Generic[Work]):
    """One thread, which trains a piece while the caller takes the one before: for a GPU, and if nothing can fork.

    It works as `ForkedWorkers` does. `count`: of the processes that it stands for; work that is cut for so many gives
    the same sums.
    """

    def __init__(self, train: Train[Work], *, count: int = 1) -> None:
        self._train, self._params, self.count = train, torch.empty(0), count
        self._running: Future[PartialReply] | None = None
        self._pool = ThreadPoolExecutor(1, "cohort", initializer=torch.set_num_threads, initargs=(1,))

    def begin(self, params: Tensor) -> None:
        wait([self._running] if self._running else [])
        self._params, self._running = params, None

    def replies(self, works: Iterable[Work]) -> Iterator[PartialReply]:
        for work in works:
            before, self._running = self._running, self._pool.submit(self._train, self._params, work)
            if before is not None:
                yield before.result()
        if self._running is not None:
            yield self._running.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class ForkedWorkers(Generic[Work]):
    """Processes, forked when the first work comes, that give replies back in the order of the work.

    Args:
        train: of parameters (num_params,) and a piece of work, the replies. Workers have it as it was when they were
            forked, so that work and replies' numbers are all that travels.
        count: how many processes.
        num_params: of the model.
        sum_length: of the sum in a reply; `num_params` unless it is given.
    """

    def __init__(self, train: Train[Work], *, count: int, num_params: int, sum_length: int | None = None) -> None:
        places = QUEUED * count + 1
        self._train, self.count = train, count
        self._params = _mapped(num_params, dtype=torch.float32)
        self._slots = _mapped(places, sum_length or num_params, dtype=torch.float64)
        self._free = deque(range(places))
        self._processes: list[_Process] = []
        self._waiting: deque[tuple[_Process, int]] = deque()

    def begin(self, params: Tensor) -> None:
        """Sets the parameters that work starts from, until the next call. What an earlier round left is given up."""
        while self._waiting:
            self._next()
        self._params.copy_(params)

    def replies(self, works: Iterable[Work]) -> Iterator[PartialReply]:
        """The replies of each piece. Their sum is overwritten once the next ones are asked for.

        Raises:
          RunLostError: the process that had a piece is gone.
        """
        for work in works:
            self._submit(work)
            if not self._free:
                yield self._result()
        while self._waiting:
            yield self._result()

    def _submit(self, work: Work) -> None:
        if not self._processes:
            self._processes = [self._fork() for _ in range(self.count)]
        slot = self._free.popleft()
        try:
            process = min(self._processes, key=_Process.left_to_do)
            process.give(slot, work)
        except (EOFError, OSError) as error:
            raise RunLostError(KILLED) from error
        self._waiting.append((process, slot))

    def _result(self) -> PartialReply:
        told, slot = self._next()
        if isinstance(told, Exception):
            raise told
        return replace(told, values=self._slots[slot].view(told.values.dtype))

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.pipe.close()
            process.worker.kill()
            process.worker.join()
        self._processes.clear()
        self._waiting.clear()

    def _next(self) -> tuple[PartialReply | Exception, int]:
        process, slot = self._waiting.popleft()
        self._free.append(slot)
        try:
            return process.take(), slot
        except (EOFError, OSError) as error:
            raise RunLostError(KILLED) from error

    def _fork(self) -> _Process:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        words = (self._train, self._params, self._slots, there, os.getpid())
        worker = context.Process(target=_serve, args=words, daemon=True)
        with warnings.catch_warnings():
            # Newer Pythons warn of forks beside threads. These children compute in one thread and take no lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            worker.start()
        there.close()
        return _Process(worker, here)


class Workers(Protocol[Work]):
    """`ForkedWorkers`, `ThreadWorker` and `discreet.simulation.ray_workers.RayWorkers`."""

    count: int

    def begin(self, params: Tensor) -> None: ...

    def replies(self, works: Iterable[Work]) -> Iterator[PartialReply]: ...

    def close(self) -> None: ...


def can_fork() -> bool:
    """True if this process may have workers: on Linux, and unless it is a daemon, as those of a pool are."""
    return (
        not multiprocessing.current_process().daemon
        and hasattr(ctypes.CDLL(None), "prctl")
        and "fork" in multiprocessing.get_all_start_methods()
    )


def _mapped(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that processes forked later share; not in /dev/shm, which containers keep small."""
    memory = mmap.mmap(-1, dtype.itemsize * math.prod(shape))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(eq=False)
class _Process:
    """A worker as its parent sees it: the end of its pipe, how much it still has to do, and what was read early."""

    worker: BaseProcess
    pipe: Connection
    given: int = 0
    told: deque[PartialReply | Exception] = field(default_factory=deque)

    def left_to_do(self) -> int:
        """The number of pieces of work that it has not answered yet."""
        while self.given and self.pipe.poll():
            self._read()
        return self.given

    def give(self, slot: int, work: object) -> None:
        self.pipe.send((slot, work))
        self.given += 1

    def take(self) -> PartialReply | Exception:
        """The answer to the oldest piece of work that was not taken."""
        if not self.told:
            self._read()
        return self.told.popleft()

    def _read(self) -> None:
        self.told.append(self.pipe.recv())
        self.given -= 1


def _serve(train: Train[Any], params: Tensor, slots: Tensor, pipe: Connection, parent: int) -> None:
    """A worker's life. It ends with its parent, however that ends, and leaves signals to it."""
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
        # Without the sum, of which only the type travels: PyTorch would send a tensor by a file.
        pipe.send(replace(replies, values=torch.empty(0, dtype=values.dtype)))
