"""The cost of a simulated round as population and cohort grow, and FLUTE's published benchmark.

A round is that of `discreet simulate`: drawing a Poisson cohort, training it, clipping, adding up
and noising. Memory is the peak resident size of this process during the round minus that before it;
workers share it, and each adds the memory of one chunk. Every client is a view of the data set,
determined by its number, and is not stored. FLUTE's benchmark is logistic regression for 100 rounds
of 10 of 1000 clients, batches of 10, learning rate 0.03; FLUTE itself reports 200 s for it, and
Flower's simulation 1814 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cohort_speed import SEED, WORK, digits_like
from benchmarks.side_by_side import Row
from discreet.data.examples import Task
from discreet.data.partition import SampledExamples
from discreet.models.models import build_model, flatten_parameters
from discreet.planning.plan import Plan, planned
from discreet.planning.state import State, initial_state
from discreet.privacy.randomness import secure_source
from discreet.protocol.messages import TrainRequest
from discreet.run_files.compose import load_config
from discreet.server.round import stepped
from discreet.server.transport import ReplyStats
from discreet.simulation.cohort import BatchedTransport, engine_of

# (population, expected cohort): growing populations, then growing cohorts of the largest one.
SCALES = (
    (1000, 100),
    (10_000, 100),
    (100_000, 100),
    (1_000_000, 100),
    (1_000_000, 1000),
    (1_000_000, 10_000),
)
FLUTE = (
    "model.name=logistic_regression",
    "data.num_clients=1000",
    "sampling.probability=0.01",
    "training.learning_rate=0.03",
    "privacy.user.enabled=false",
)
FLUTE_ROUNDS = 100
PER_CLIENT = 60


def rows(
    *,
    model: str = "logistic_regression",
    scales: Sequence[tuple[int, int]] = SCALES,
    flute_rounds: int = FLUTE_ROUNDS,
) -> list[Row]:
    """A row for each scale, and one for FLUTE's benchmark."""
    task = digits_like()
    found = [scale(model, task, population, cohort) for population, cohort in scales]
    flute = planned(load_config([*WORK, *FLUTE]))
    seconds, _ = _timed(lambda: _rounds(flute, task, count=flute_rounds, population=1000))
    return [*found, {"what": f"FLUTE's benchmark, {flute_rounds} rounds", "seconds": seconds}]


def scale(model: str, task: Task, population: int, cohort: int) -> Row:
    """One round, after a warm-up round."""
    sizes = (f"data.num_clients={population}", f"sampling.probability={cohort / population}")
    run = planned(load_config([*WORK, f"model.name={model}", *sizes]))
    _rounds(run, task, count=1, population=population)
    seconds, peak = _timed(lambda: _rounds(run, task, count=1, population=population))
    row = {"what": "one round", "population": population, "cohort": cohort, "seconds": seconds}
    return row | {"clients_per_second": cohort / seconds, "peak_mib": peak}


def _rounds(plan: Plan, task: Task, *, count: int, population: int) -> State:
    held = SampledExamples(population, len(task.train), PER_CLIENT, SEED)
    model = build_model(
        plan.run.model.name, task.shape.input_shape, task.shape.num_classes, seed=SEED
    )
    state = initial_state(flatten_parameters(model), clip_norm=plan.first_clip_norm)
    engine = engine_of(plan, task, dealt=held)
    with BatchedTransport(plan, engine, accounts=None) as exchange:
        for number in range(1, count + 1):
            cohort = plan.sampling.draw(exchange.available_clients(), secure_source())
            replies = exchange.ask(
                TrainRequest(number, state.clip_norm, plan.run), state.params, cohort
            )
            summed = plan.mechanism.add_up(filter(None, map(ReplyStats().count, replies)), state)
            released = plan.mechanism.release(summed, state, secure_source())
            state = stepped(state, plan, released)
    return state


def _timed(run: Callable[[], object]) -> tuple[float, float | None]:
    """Seconds, and the peak of resident memory above the start in MiB; None if the system does not
    tell."""
    before = _reset_peak()
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    peak = _resident("VmHWM")
    return seconds, None if before is None or peak is None else peak - before


def _reset_peak() -> float | None:
    forget = Path("/proc/self/clear_refs")
    if not forget.exists():
        return None
    forget.write_text("5")  # Linux: resets the peak to the current resident size
    return _resident("VmRSS")


def _resident(name: str) -> float | None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    sizes = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0]) / 1024 if sizes else None
