"""Trains whole cohorts of virtual clients in chunks: the engine, the size of a chunk, and the
replies. `InProcessTransport` trains clients sequentially."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from discreet.data.examples import Task
from discreet.data.partition import ClientExamples, Numbers, client_examples_of
from discreet.mechanisms.client_noise import LocalPrivacy, release_update
from discreet.mechanisms.mechanism import Mechanism
from discreet.mechanisms.round_state import RoundStart
from discreet.mechanisms.sums import AnswerRelease, AnswerSum, PartialReply, UpdateRows
from discreet.models.fixed_part import behind_fixed
from discreet.models.models import (
    load_parameters,
    model_for,
    outputs_of,
)
from discreet.models.rows_apart import outputs_apart
from discreet.node.account import Accounts, Refused
from discreet.node.admission import admit
from discreet.node.client import ExactReply, noised_vector, outputs_of_a_copy
from discreet.node.work import Work, client_terms
from discreet.planning.plan import Plan
from discreet.privacy.clipping import clip_by_norm, row_norms
from discreet.privacy.randomness import RandomSource, secure_source, seeded_source
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import EPSILONS, TrainRequest
from discreet.queries.query import Query
from discreet.server.model_ratings import answers_of
from discreet.server.transport import Failure
from discreet.settings.adjacency import EXAMPLE
from discreet.simulation.chunk import (
    Chunk,
    Draws,
    SecureDraws,
    SeededDraws,
    SharedExamples,
    TrainedExamples,
    shared_examples,
    table_of,
    trained_on,
)
from discreet.simulation.chunk_choice import (
    CHUNK_BYTES,
    chunk_size,
    client_floats,
    made_up_examples,
    tried_together,
)
from discreet.simulation.dual_form import dual_updates, largest_in_dual_form
from discreet.simulation.layer_sequence import LayerSequence, sequence_of
from discreet.simulation.mapped_model import MappedModel, mapped_model
from discreet.simulation.workers import LocalWorkers, Workers, can_fork
from discreet.training.local_training import LocalSettings, settings_without_noise

# Largest number of floats in updates that are clipped and added up at once: they stay in a core's
# cache.
PIECE = 2**17


@dataclass(frozen=True)
class _ChunkWork:
    """One chunk of clients in one round."""

    clients: tuple[int, ...]
    training: tuple[LocalSettings, ...]
    local: LocalPrivacy | None
    request: TrainRequest
    # the largest epsilons that the clients have spent, by their names in `PartialReply`
    largest: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Engine:
    """The state for training virtual clients. It holds no source of randomness, so it may be sent
    to other processes.

    Attributes:
        seed, mechanism, vector: those of the run; `vector` is the secure sum, None without secure
          aggregation.
        data: the data set that all share, on the computing device; `client_examples`: the rows of
          each client.
        chunk: the largest number of clients that are trained together.
        workers: the number of chunks that are trained at the same time, each in a separate process.
        largest_in_dual_form: the number of examples up to which clients are trained so; 0 if never.
        rating: the query that clients answer from held-out examples, the part of the model that it
          is about, and the release of the answers; None without a query.
    """

    seed: int | None
    mechanism: Mechanism
    data: SharedExamples
    client_examples: ClientExamples | TrainedExamples
    model: LayerSequence | MappedModel
    chunk: int
    workers: int
    largest_in_dual_form: int = 0
    vector: SecureSum | None = None
    rating: tuple[Query, nn.Module, AnswerRelease] | None = None

    @property
    def is_exact(self) -> bool:
        """True if sums are over whole numbers, so that their order does not matter."""
        if self.vector is not None:
            return True
        start = RoundStart(0, torch.zeros(1), 1.0)
        exact = self.mechanism.add_up([], start).part().grid is not None
        return exact and (self.rating is None or self.rating[2].on_grid)

    def on(self, device: torch.device) -> Engine:
        """The same engine with data and models on a device. The chunk size does not change."""
        if device == self.data.device:
            return self
        if isinstance(self.model, MappedModel):
            self.model.model.to(device)
        if self.rating is not None:
            self.rating[1].to(device)
        return replace(
            self, data=SharedExamples(self.data.inputs.to(device), self.data.targets.to(device))
        )

    def replies(self, params: Tensor, work: _ChunkWork) -> PartialReply:
        """Trains a chunk from `params`, and adds up its replies."""
        params = params.to(self.data.device)
        request = work.request
        if self.vector is not None:
            return replace(self._vectors(self.vector, params, work), **work.largest)
        rows: Iterable[UpdateRows] = ()
        if request.work.trains:
            updates = self._trained(params, work)
            pieces = torch.split(updates, max(1, PIECE // updates.shape[1]))
            rows = (UpdateRows(piece, row_norms(piece) <= request.clip_norm) for piece in pieces)
        start = RoundStart(request.round - 1, params, request.clip_norm)
        part: PartialReply = self.mechanism.add_up(rows, start).part()
        if request.work.query:
            assert self.rating is not None
            answers = AnswerSum(self.rating[2])
            answers.add(self._answers(params, work))
            part = replace(part, answers=answers.part())
        return replace(part, replies=len(work.clients), **work.largest)

    def _vectors(self, vector: SecureSum, params: Tensor, work: _ChunkWork) -> PartialReply:
        """The sum of the clients' vectors for a masked sum, each with its own noise."""
        count = len(work.clients)
        request = work.request
        if request.work.query:
            answers = self._answers(params, work)
        else:
            answers = None
        updates = torch.zeros(count, 0)
        norms = torch.zeros(count)
        if vector.largest_sum:
            updates = self._chunk(work).steps(params, request.run.example.clip_norm).cpu()
        elif request.work.trains:
            updates, norms = clip_by_norm(self._trained(params, work), request.clip_norm)
        total = torch.zeros(vector.length, dtype=torch.int64)
        for row, source in enumerate(self._sources(work)):
            if answers is None:
                answer = None
            else:
                answer = answers[row]
            below = bool(norms[row] <= request.clip_norm)
            total += noised_vector(vector, ExactReply(updates[row], below, answer), request, source)
        return PartialReply(total, 0, count, request.clip_norm)

    def _answers(self, params: Tensor, work: _ChunkWork) -> Tensor:
        """The clients' answers (k, length), or (k, length + 1) if they noise them; float32."""
        examples = self.client_examples
        assert self.rating is not None
        assert isinstance(examples, TrainedExamples)
        query, rated, release = self.rating
        held = [examples.held_out(client) for client in work.clients]
        rows = torch.from_numpy(np.concatenate(held)).to(self.data.device)
        load_parameters(rated, params)
        targets = self.data.targets[rows].cpu()
        sizes = [len(numbers) for numbers in held]
        own = release.own
        sources = self._sources(work) if own is not None else []
        outputs = self._outputs(rated, torch.split(rows, sizes), sources)
        pairs = zip(outputs, torch.split(targets, sizes), strict=True)
        answers = [query.answer(*pair) for pair in pairs]
        if own is not None:
            drawn = zip(answers, sizes, sources, strict=True)
            answers = [own.noised(answer, size, source) for answer, size, source in drawn]
        return torch.stack(answers).to(torch.float32)

    def _outputs(
        self, rated: nn.Module, rows: Sequence[Tensor], sources: Sequence[RandomSource]
    ) -> Sequence[Tensor]:
        """The outputs of a model for each client's `rows`, each (m, k). With the clients' `sources`
        those of a row follow from it alone."""
        if isinstance(self.model, LayerSequence):  # its layers read each row alone
            outputs = outputs_of(rated, self.data.read(torch.cat(list(rows))))
            return torch.split(outputs, list(map(len, rows)))
        inputs = map(self.data.read, rows)
        if not sources:
            return [outputs_of_a_copy(rated, each) for each in inputs]
        pairs = zip(inputs, sources, strict=True)
        return [outputs_apart(rated, each, source=source) for each, source in pairs]

    def _trained(self, params: Tensor, work: _ChunkWork) -> Tensor:
        """The updates of the clients, (k, num_params)."""
        chunk = self._chunk(work)
        most = int(chunk.table.sizes.max(initial=0))
        if 0 < most <= self.largest_in_dual_form:
            updates = dual_updates(chunk, params).cpu()
        else:
            updates = chunk.updates(params).cpu()
        if work.local is not None:
            for row in range(len(updates)):
                updates[row] = release_update(
                    updates[row], work.local, source=chunk.draws.of(row).child("local")
                )
        return updates

    def _chunk(self, work: _ChunkWork) -> Chunk:
        table = table_of(list(map(self.client_examples.examples, work.clients)))
        draws: Draws = (
            SecureDraws(secure_source()) if self.seed is None else SeededDraws(self._sources(work))
        )
        return Chunk(self.model, self.data, table, work.training, draws)

    def _sources(self, work: _ChunkWork) -> list[RandomSource]:
        """Each client's own source; without a seed a single secure source for all."""
        if self.seed is None:
            return [secure_source()] * len(work.clients)
        seeded = seeded_source(self.seed)
        return [seeded.child("client", work.request.round, client) for client in work.clients]


class BatchedTransport:
    """A `Transport` that trains chunks of the cohort, each as one computation.

    The replies equal those of `InProcessTransport` up to rounding; without a seed they have the
    same distribution up to it.
    Only a few chunks are held, however large cohort and population are: the sum of a reply may be
    overwritten once the next one is asked for. It is a context manager for its workers, which run
    on this machine unless `workers` makes others. Without workers this process trains a chunk when
    its reply is asked for.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        *,
        accounts: Accounts | None,
        workers: MakesWorkers | None = None,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.accounts = accounts
        self.clients = range(len(engine.client_examples))
        self._terms = client_terms(plan.run)
        self._workers = (workers or _workers_here)(engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.close()

    def available_clients(self) -> Sequence[int]:
        """Every virtual client."""
        return self.clients

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterator[PartialReply | Failure]:
        """Trains the cohort. The spending of clients is on disk before their chunk is computed."""
        refused: list[Failure] = []
        works = self._admitted(asked, cohort, refused)
        if self._workers is None:
            trained: Iterator[PartialReply] = map(partial(self.engine.replies, params), works)
        else:
            trained = self._workers.replies(params, works)
        # Read last: by then all chunks were admitted, and the list is complete.
        return chain(trained, refused)

    def _admitted(
        self, asked: TrainRequest, cohort: Sequence[int], refused: list[Failure]
    ) -> Iterator[_ChunkWork]:
        """The chunks of the clients that take part; the others are added to `refused`."""
        work = Work(asked, self.plan.mechanisms, self._terms)
        for clients, sizes in self._chunks(cohort):
            named = dict(zip(map(str, clients), sizes, strict=True))
            admitted = list[int]()
            training = list[LocalSettings]()
            local = None
            largest = dict.fromkeys(EPSILONS, 0.0)
            for name, who in admit(work, named, accounts=self.accounts).items():
                if isinstance(who, Refused):
                    refused.append(Failure(int(name), "refused", str(who)))
                    continue
                admitted.append(int(name))
                if who.training:
                    training.append(who.training)
                local = who.local
                for epsilon in EPSILONS:
                    largest[epsilon] = max(largest[epsilon], getattr(who, epsilon))
            if admitted:
                yield _ChunkWork(tuple(admitted), tuple(training), local, asked, largest)

    def _chunks(self, cohort: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """The cohort in chunks of clients of similar size, largest first, with their sizes. Those
        that are trained in the dual form are in chunks of their own, so that no other client's size
        decides about the form in which one is trained. It still decides about its last bits: a
        chunk is as wide as its largest client, and its rows lie elsewhere with one client more.
        docs/privacy.md says what that can do (Noise, rounding of other simulated clients)."""
        clients: Numbers = np.asarray(cohort, dtype=np.int64)
        sizes = self.engine.client_examples.sizes(clients)
        order = np.argsort(-sizes, kind="stable")
        in_dual_form = sizes[order] <= self.engine.largest_in_dual_form
        for alike in (order[~in_dual_form], order[in_dual_form]):
            step = self._chunk_size(len(alike))
            for start in range(0, len(alike), step):
                chosen = alike[start : start + step]
                yield clients[chosen].tolist(), sizes[chosen].tolist()

    def _chunk_size(self, clients: int) -> int:
        """Every worker gets the same number of chunks of about the same size, so that none
        idles."""
        workers = self.engine.workers
        if self._workers is not None:
            workers = self._workers.count
        rounds = math.ceil(clients / (self.engine.chunk * workers))
        return max(1, math.ceil(clients / max(1, rounds * workers)))


def _workers_here(engine: Engine) -> Workers | None:
    """Forked processes, or None if this process trains: on a GPU, or if forking is not possible."""
    if engine.workers == 1 or engine.data.device.type != "cpu" or not can_fork():
        return None
    size = engine.model.layout.size
    if engine.vector is None:
        length = size
    else:
        length = engine.vector.length
    return LocalWorkers(engine.replies, count=engine.workers, num_params=size, sum_length=length)


MakesWorkers = Callable[[Engine], Workers | None]


def masked_vector(plan: Plan) -> SecureSum | None:
    """The secure sum of a run; None without secure aggregation."""
    return plan.mechanism.participation.vector


def engine_of(
    plan: Plan, task: Task, device_name: str = "cpu", *, dealt: ClientExamples | None = None
) -> Engine:
    """The engine for a run on a task; `dealt` replaces the run's own partition. It computes a chunk
    on every core, or one at a time on a GPU."""
    run = plan.run
    device = torch.device(device_name)
    model = model_for(plan.model, task.shape, seed=0).to(device)
    learned, examples_read = behind_fixed(model, task.train)
    data = shared_examples(examples_read, device)
    local = settings_without_noise(run.training, run.task)
    by_example = EXAMPLE in plan.mechanisms
    by_hand = sequence_of(learned, data.inputs.shape[1:], loss=local.loss)
    layers = by_hand or mapped_model(learned, local.loss, by_example=by_example)
    client_examples = trained_on(dealt or client_examples_of(task, run.data), run.evaluation)
    dual = 0 if by_example else largest_in_dual_form(layers, local)
    most = _most_examples(client_examples)
    made = made_up_examples(learned, data)
    floats = client_floats(
        learned,
        made.inputs[:1],
        batch_size=run.training.batch_size,
        dual=most if most <= dual else 0,
        built=by_example and isinstance(layers, MappedModel),
    )
    kind = _kind_of(plan, device)
    if isinstance(layers, MappedModel):
        room = CHUNK_BYTES[kind] // (4 * floats)
        layers = tried_together(layers, made, run.task, by_example=by_example, room=room)
        if not layers.together:
            device = torch.device("cpu")
    return Engine(
        seed=plan.seed,
        mechanism=plan.mechanism,
        data=data,
        client_examples=client_examples,
        model=layers,
        chunk=chunk_size(floats, kind),
        workers=len(os.sched_getaffinity(0)) if device.type == "cpu" else 1,
        largest_in_dual_form=dual,
        vector=masked_vector(plan),
        rating=(plan.query, learned, answers_of(plan, plan.query)) if plan.query else None,
    ).on(device)


def _most_examples(clients: ClientExamples | TrainedExamples) -> int:
    """The most examples that one of the first clients has. They represent all: the size of a chunk
    does not change the updates."""
    first = np.arange(min(len(clients), 100))
    return int(clients.sizes(first).max(initial=0))


def _kind_of(plan: Plan, device: torch.device) -> str:
    """The kind of device that trains chunks: the tasks of a Ray cluster may have GPUs."""
    if plan.engine == "ray" and plan.ray.num_gpus:
        return "cuda"
    return device.type
