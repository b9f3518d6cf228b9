"""Trains whole cohorts of virtual clients, in batches. `InProcessTransport` trains them sequentially."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from discreet.data.partition import Numbers
from discreet.mechanisms.client_noise import LocalPrivacy, release_update
from discreet.mechanisms.mechanism import ServerRelease
from discreet.mechanisms.sums import AnswerRelease, AnswerSum, PartialReply
from discreet.node.account import Accounts, Refused
from discreet.node.admission import Admitted, admit
from discreet.node.client import Values, noised_vector
from discreet.privacy.clipping import clip_by_norm, row_norms
from discreet.privacy.randomness import RandomSource, secure_source, seeded_source
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import EPSILONS, TRAIN, TrainRequest, Work
from discreet.server.plan import Plan
from discreet.server.run_plan import answers_of, round_settings
from discreet.server.transport import Failure
from discreet.simulation.chunk import Chunk, Draws, SecureDraws, SeededDraws, chunk_steps, chunk_updates
from discreet.simulation.client_examples import table_of
from discreet.simulation.engine import Engine
from discreet.simulation.workers import LocalWorkers, Workers, can_fork
from discreet.training.local_training import LocalSettings

# The updates that are clipped and added up at once are at most so many floats: they stay in a core's cache.
PIECE = 2**17


class BatchedTransport:
    """A `Transport` that trains chunks of the cohort, each as one computation.

    The replies are those of `InProcessTransport`: with a seed every client draws from its own streams, and without one
    the law of each draw is the same. What is held is a few chunks, however large the cohort and the population are:
    the sum of a reply may be overwritten once the next one is asked for. A context manager, for its workers: of
    this machine, unless `workers` makes others.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        *,
        accounts: Accounts | None,
        vector: SecureSum | None = None,
        workers: MakesWorkers | None = None,
    ) -> None:
        self.plan, self.engine, self.accounts = plan, engine, accounts
        answers = answers_of(plan, engine.rates.query) if engine.rates else None
        trainer = _Trainer(plan.seed, plan.run.example.clip_norm, engine, round_settings(plan).release, answers, vector)
        self._workers = (workers or _workers_here)(trainer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def available_clients(self) -> Sequence[int]:
        """Every virtual client."""
        return range(len(self.engine.client_examples))

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int], work: Work = TRAIN
    ) -> Iterator[PartialReply | Failure]:
        """Trains the cohort. What clients spend is on disk before their chunk is computed."""
        asked = TrainRequest(round_number, clip_norm, self.plan.run, work=work)
        refused: list[Failure] = []
        self._workers.begin(params)
        yield from self._workers.replies(self._admitted(asked, cohort, refused))
        yield from refused

    def _admitted(self, asked: TrainRequest, cohort: Sequence[int], refused: list[Failure]) -> Iterator[_Work]:
        """The chunks of those that take part; the others are added to `refused`."""
        for clients, sizes in self._chunks(cohort):
            named = dict(zip(map(str, clients), sizes, strict=True))
            found = admit(asked, named, accounts=self.accounts)
            refused += [Failure(int(n), "refused", str(who)) for n, who in found.items() if isinstance(who, Refused)]
            admitted = {int(name): who for name, who in found.items() if isinstance(who, Admitted)}
            if admitted:
                each = admitted.values()
                largest = {name: max(getattr(who, name) for who in each) for name in EPSILONS}
                training, local = tuple(who.training for who in each), next(iter(each)).local
                yield _Work(tuple(admitted), training, local, asked, largest)

    def _chunks(self, cohort: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """The cohort in chunks of clients of similar size, those with most examples first, and their sizes."""
        clients: Numbers = np.asarray(cohort, dtype=np.int64)
        sizes = self.engine.client_examples.sizes(clients)
        order = np.argsort(-sizes, kind="stable")
        # Every worker gets as many chunks, and all are about as large: none idles.
        rounds = math.ceil(len(clients) / (self.engine.chunk * self._workers.count))
        step = max(1, math.ceil(len(clients) / max(1, rounds * self._workers.count)))
        for start in range(0, len(clients), step):
            chosen = order[start : start + step]
            yield clients[chosen].tolist(), sizes[chosen].tolist()


@dataclass(frozen=True, eq=False)
class _Work:
    """One chunk of clients in one round."""

    clients: tuple[int, ...]
    training: tuple[LocalSettings, ...]
    local: LocalPrivacy | None
    request: TrainRequest
    largest: Mapping[str, Any]  # of the epsilons that they have spent, by their names in `PartialReply`


def _workers_here(trainer: _Trainer) -> Workers[_Work]:
    engine, size = trainer.engine, trainer.engine.model.layout.size
    length = size if trainer.vector is None else trainer.vector.length
    forks = engine.workers > 1 and engine.data.device.type == "cpu" and can_fork()
    return LocalWorkers(trainer.replies, count=engine.workers, num_params=size, sum_length=length, forks=forks)


@dataclass(frozen=True, eq=False)
class _Trainer:
    """All that a worker needs to do a piece of work. It holds no source of randomness, so it may travel."""

    seed: int | None
    example_norm: float
    engine: Engine
    release: ServerRelease
    answers: AnswerRelease | None
    vector: SecureSum | None = None

    @property
    def is_exact(self) -> bool:
        """True if its sums are of whole numbers, so that their order does not matter."""
        return self.vector is not None or (self.release.exact and (self.answers is None or self.answers.on_grid))

    def on(self, device: str) -> _Trainer:
        """The same, with its data and its models there."""
        return replace(self, engine=self.engine.on(torch.device(device)))

    def replies(self, params: Tensor, work: _Work) -> PartialReply:
        """Asks a chunk, which starts from `params`, and adds up what it says."""
        params = params.to(self.engine.data.device)
        if self.vector is not None:
            return replace(self._vectors(self.vector, params, work), **work.largest)
        part = self._updates(params, work)
        if work.request.work.query:
            assert self.answers is not None
            total = AnswerSum(self.answers)
            total.add(self.engine.answers(work.clients, params, _sources(self.seed, work)))
            part = replace(part, answers=total.part())
        return replace(part, **work.largest)

    def _vectors(self, vector: SecureSum, params: Tensor, work: _Work) -> PartialReply:
        """The sum of what the clients put into a masked sum, each with the noise of its own."""
        sources, count, request = _sources(self.seed, work), len(work.clients), work.request
        answers = None
        if request.work.query:
            answers = self.engine.answers(work.clients, params, sources)
        updates, norms = torch.zeros(count, 0), torch.zeros(count)
        if vector.largest_sum:
            updates = chunk_steps(self._chunk(work), params, self.example_norm).cpu()
        elif request.work.trains:
            updates, norms = clip_by_norm(self._trained(params, work), request.clip_norm)
        total = torch.zeros(vector.length, dtype=torch.int64)
        for row, source in enumerate(sources):
            answer, below = None if answers is None else answers[row], bool(norms[row] <= request.clip_norm)
            total += noised_vector(vector, Values(updates[row], below, answer), request, source)
        return PartialReply(total, 0, count, request.clip_norm)

    def _trained(self, params: Tensor, work: _Work) -> Tensor:
        """The updates of the clients, (k, num_params)."""
        chunk = self._chunk(work)
        updates = chunk_updates(chunk, params).cpu()
        if work.local is not None:
            for row in range(len(updates)):
                updates[row] = release_update(updates[row], work.local, source=chunk.draws.of(row).child("local"))
        return updates

    def _chunk(self, work: _Work) -> Chunk:
        engine = self.engine
        table = table_of([engine.client_examples.examples(client) for client in work.clients])
        secure = self.seed is None
        draws: Draws = SecureDraws(secure_source()) if secure else SeededDraws(_sources(self.seed, work))
        return Chunk(engine.model, engine.data, table, work.training, draws)

    def _updates(self, params: Tensor, work: _Work) -> PartialReply:
        """The sum of the clients' updates; 0 if they were not asked to train."""
        clip_norm = work.request.clip_norm
        total = self.release.empty(params.numel(), clip_norm)
        if not work.request.work.trains:
            return replace(total.part(), replies=len(work.clients))
        updates = self._trained(params, work)
        for piece in torch.split(updates, max(1, PIECE // updates.shape[1])):
            total.add(piece, row_norms(piece) <= clip_norm)
        return total.part()


MakesWorkers = Callable[[_Trainer], Workers[_Work]]


def _sources(seed: int | None, work: _Work) -> list[RandomSource]:
    """Each client's own; without a seed one secure source stands for all."""
    if seed is None:
        return [secure_source()] * len(work.clients)
    seeded = seeded_source(seed)
    return [seeded.child("client", work.request.round, client) for client in work.clients]
