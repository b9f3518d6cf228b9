"""Trains whole cohorts of virtual clients, many at a time: what `InProcessExchange` does one by one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from client_app.local_privacy import LocalPrivacy, release_update, round_privacy
from discreet.config import RunConfig
from discreet.privacy.clipping import row_norms
from discreet.privacy.noise import secure_source, seeded_source
from simulation.accounts import Accounts, Admitted, admit
from simulation.batches import table_of
from simulation.chunk import Chunk
from simulation.draws import Draws, SecureDraws, SeededDraws
from simulation.engine import Engine
from simulation.stacked_training import stacked_updates
from simulation.views import Numbers
from strategies.exchange import Failure, Replies

# The updates that are clipped and added up at once are at most so many floats: they stay in a core's cache.
PIECE = 2**17


class BatchedExchange:
    """An `Exchange` that trains chunks of the cohort, each as one computation.

    The replies are those of `InProcessExchange`: with a seed every client draws from its own streams, and without one
    the law of each draw is the same. What is held is a few chunks, however large the cohort and the population are.
    A context manager: its threads end with it.
    """

    def __init__(self, run: RunConfig, engine: Engine, *, accounts: Accounts | None) -> None:
        self.run, self.engine, self.accounts = run, engine, accounts
        self._pool = ThreadPoolExecutor(engine.workers, "cohort", initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def members(self) -> Sequence[int]:
        """Every virtual client."""
        return range(len(self.engine.views))

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int]
    ) -> Iterator[Replies | Failure]:
        """Trains the cohort. What clients spend is on disk before their chunk is computed."""
        local = round_privacy(self.run, round_number=round_number)
        params, waiting = params.to(self.engine.data.device), deque[Future[Replies]]()
        for clients, sizes in self._chunks(cohort):
            admitted, failures = admit(
                self.run, clients, sizes, accounts=self.accounts, local=local, round_number=round_number
            )
            yield from failures
            if admitted.clients:
                work = _Work(self.run, self.engine, admitted, local, round_number, clip_norm)
                waiting.append(self._pool.submit(work.replies, params))
            if len(waiting) > self.engine.workers:
                yield from _pieces(waiting.popleft().result())
        while waiting:
            yield from _pieces(waiting.popleft().result())

    def _chunks(self, cohort: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """The cohort in chunks of clients of similar size, those with most examples first, and their sizes."""
        clients: Numbers = np.asarray(cohort, dtype=np.int64)
        sizes = self.engine.views.sizes(clients)
        order = np.argsort(-sizes, kind="stable")
        # A small cohort is shared out, so that no worker idles.
        step = max(1, min(self.engine.chunk, math.ceil(len(clients) / self.engine.workers)))
        for start in range(0, len(clients), step):
            chosen = order[start : start + step]
            yield clients[chosen].tolist(), sizes[chosen].tolist()


@dataclass(frozen=True, eq=False)
class _Work:
    """One chunk of clients in one round."""

    run: RunConfig
    engine: Engine
    admitted: Admitted
    local: LocalPrivacy | None
    round_number: int
    clip_norm: float

    def replies(self, params: Tensor) -> Replies:
        """Trains the chunk from `params`."""
        draws, spent = self._draws(), self.admitted
        table = table_of([self.engine.views.examples(client) for client in spent.clients])
        chunk = Chunk(table, spent.settings, draws)
        updates = stacked_updates(self.engine.stack, params, self.engine.data, chunk).cpu()
        if self.local is not None:
            for row in range(len(updates)):
                updates[row] = release_update(updates[row], self.local, source=draws.local(row))
        below = torch.cat([row_norms(piece) <= self.clip_norm for piece in _split(updates)])
        return Replies(updates, below, spent.epsilon_example, spent.epsilon_local, spent.epsilon_local_pure)

    def _draws(self) -> Draws:
        if self.run.seed is None:
            return SecureDraws(secure_source())
        seeded = seeded_source(self.run.seed)
        return SeededDraws([seeded.child("client", self.round_number, client) for client in self.admitted.clients])


def _split(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, max(1, PIECE // rows.shape[1]))


def _pieces(replies: Replies) -> Iterator[Replies]:
    """The same in parts of a few rows."""
    spent = replies.epsilon_example, replies.epsilon_local, replies.epsilon_local_pure
    updates = _split(replies.updates)
    for rows, below in zip(updates, torch.split(replies.below, len(updates[0])), strict=True):
        yield Replies(rows, below, *spent)
