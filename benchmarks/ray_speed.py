"""The cost of a Ray cluster on one machine, beside the forked workers.

Rounds are those of benchmarks/cohort_speed.py: 100 of 1000 clients of 60 images, sums on the grid.
Each way has its own process and two CPUs, and they take turns. One way is a cluster of two nodes
with one CPU each, both on this machine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

import torch

from benchmarks.cohort_scale_speed import PER_CLIENT
from benchmarks.cohort_speed import CLIP_NORM, COHORT, MODELS, SEED, WORK, digits_like
from benchmarks.side_by_side import Row
from discreet.data.partition import SampledExamples
from discreet.mechanisms.round_state import RoundStart
from discreet.models.models import build_model, flatten_parameters
from discreet.planning.plan import planned
from discreet.protocol.messages import TrainRequest
from discreet.run_files.compose import load_config
from discreet.server.transport import ReplyStats
from discreet.simulation.cohort import BatchedTransport, MakesWorkers, engine_of

FORKED, ONE_NODE, TWO_NODES = (
    "forked workers",
    "Ray, one node of two CPUs",
    "Ray, two nodes of one CPU",
)
WAYS: dict[str, tuple[int, ...]] = {FORKED: (), ONE_NODE: (2,), TWO_NODES: (1, 1)}
CLIENTS, TURN_SECONDS = 1000, 1.0


def rows(
    *, models: Sequence[str] = MODELS, examples: int = 60_000, repetitions: int = 9
) -> list[Row]:
    """A row for each model and way."""
    with ExitStack() as held:
        asked = {way: held.enter_context(_process(nodes, examples)) for way, nodes in WAYS.items()}
        return [row for name in models for row in _compared(name, asked, repetitions)]


def _compared(name: str, asked: dict[str, Connection], repetitions: int) -> list[Row]:
    """Milliseconds of a round, measured in turns. Turn 0 warms up."""
    times: dict[str, list[float]] = {way: [] for way in asked}
    for repetition in range(repetitions + 1):
        for way, pipe in asked.items():
            pipe.send(name)
            turn = pipe.recv()
            times[way] += turn if repetition else []
    each = {way: median(values) for way, values in times.items()}
    beside = {FORKED: FORKED, ONE_NODE: FORKED, TWO_NODES: ONE_NODE}
    return [
        {
            "what": f"round, {name}",
            "way": way,
            "seconds": each[way],
            "beside": other,
            "ratio": each[way] / each[other],
        }
        for way, other in beside.items()
    ]


@contextmanager
def _process(nodes: tuple[int, ...], examples: int) -> Iterator[Connection]:
    """A process that runs rounds on a cluster whose nodes have these numbers of CPUs."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(there, nodes, examples)
    )
    process.start()
    there.close()
    here.recv()  # clusters start one after the other, as Ray waits only 30 s for a node
    try:
        yield here
    finally:
        here.close()
        process.join()


def _serve(pipe: Connection, nodes: tuple[int, ...], examples: int) -> None:
    torch.set_num_threads(1)
    with ExitStack() as held:
        workers = _cluster(nodes, held) if nodes else None
        pipe.send("ready")
        transports: dict[str, BatchedTransport] = {}
        while True:
            try:
                name = pipe.recv()
            except EOFError:
                return
            if name not in transports:
                transports[name] = held.enter_context(_transport(name, examples, workers))
            pipe.send(_turn(transports[name]))


def _cluster(nodes: tuple[int, ...], held: ExitStack) -> MakesWorkers:
    import ray
    from ray.cluster_utils import Cluster

    from discreet.simulation.ray_cluster import RayWorkers, connected

    cluster = Cluster()
    held.callback(cluster.shutdown)
    for cpus in nodes:
        cluster.add_node(num_cpus=cpus, include_dashboard=False, object_store_memory=2**28)
    held.callback(ray.shutdown)
    return partial(RayWorkers, cluster=held.enter_context(connected(cluster.address)))


def _transport(name: str, examples: int, workers: MakesWorkers | None) -> BatchedTransport:
    plan, task = planned(load_config([*WORK, f"model.name={name}"])), digits_like(examples)
    engine = engine_of(plan, task, dealt=SampledExamples(CLIENTS, examples, PER_CLIENT, SEED))
    return BatchedTransport(plan, replace(engine, workers=2), accounts=None, workers=workers)


def _turn(transport: BatchedTransport) -> list[float]:
    """The seconds of each round of a turn."""
    plan, times = transport.plan, list[float]()
    model = build_model(plan.run.model.name, (1, 28, 28), 10, seed=SEED)
    start, turn = RoundStart(0, flatten_parameters(model), CLIP_NORM), time.perf_counter()
    while (started := time.perf_counter()) < turn + TURN_SECONDS:
        replies = transport.ask(TrainRequest(1, CLIP_NORM, plan.run), start.params, range(COHORT))
        plan.mechanism.add_up(filter(None, map(ReplyStats().count, replies)), start)
        times.append(time.perf_counter() - started)
    return times
