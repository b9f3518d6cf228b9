"""What the server does with replies: how much memory a round takes, and how long a reply takes.

    discreet benchmark server

Memory: a round of 100 and of 1000 replies of a model of a million parameters, in a process of its own. Each reply is
made, encoded, decoded and thrown away in turn; what is counted is the largest resident size above that before the
round, in models (4 MB of float32). Time: encode, decode, clip and sum of one reply, beside the same in bare NumPy (a
copy to bytes and one back, a norm, a product, a sum in float64), in turns and in one process. `grid` is the default of
Discreet: exact sums, each update held to the clip norm in whole numbers; NumPy beside it truncates to whole numbers
too, without holding them to anything. `clipped anew` is a client that did not clip, so that the server has to. The
ratio is of the work of the core (medians), which other programs disturb less than the clock, whose ratio stands beside
it. OMP_NUM_THREADS=1 keeps NumPy's norm on one core.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.config import RunConfig, load_config
from discreet.federated.messages import TrainReply, encode_reply
from discreet.federated.round import dp_fedavg_round, initial_state
from discreet.federated.run_plan import round_settings
from discreet.federated.server_messages import decode_reply
from discreet.federated.transport import RoundReport
from discreet.privacy.clipped_sum import ClippedSum
from discreet.privacy.clipping import GridSum
from discreet.privacy.grid import grid_for
from discreet.privacy.randomness import secure_source

Row = dict[str, Any]
Floats = NDArray[np.float32]

MILLION = 1_000_000
COHORTS = (100, 1000)
NOISES = ("float", "grid")
CLIP_NORM = 1.0


def rows(*, size: int = MILLION, cohorts: tuple[int, ...] = COHORTS, repetitions: int = 41) -> list[Row]:
    """A row for each round's memory, and for each way of adding up a reply."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = [pool.apply(_memory_row, (noise, size, cohort)) for noise in NOISES for cohort in cohorts]
    return [*memory, *_times(size, repetitions)]


def replies(count: int, size: int, *, round_number: int = 1) -> Iterator[TrainReply]:
    """`count` replies as the server reads them: each is made when it is asked for, encoded by its client, decoded."""
    return (_wire(_update(number, size), round_number=round_number) for number in range(count))


def _update(number: int, size: int) -> Tensor:
    update = torch.full((size,), 0.5 * CLIP_NORM / size**0.5)
    update[number % size] *= -1
    return update


def _wire(update: Tensor, *, round_number: int = 1) -> TrainReply:
    content = encode_reply(TrainReply(round_number, update, below=True))
    return decode_reply(content, round_number=round_number, num_params=update.numel())


def one_round(noise: str, size: int, cohort: int) -> float:
    """Seconds of a round of Discreet's server: replies read, clipped, added up, noised, applied."""
    run = _run(noise, cohort)
    state = initial_state(torch.zeros(size), clip_norm=CLIP_NORM)
    started = time.perf_counter()
    updates = RoundReport().accept(replies(cohort, size))
    dp_fedavg_round(state, updates, round_settings(run), source=secure_source(), charge=lambda _: None)
    return time.perf_counter() - started


def _run(noise: str, cohort: int) -> RunConfig:
    words = [f"data.num_clients={cohort}", "sampling.probability=1", f"privacy.delta={0.1 / cohort}"]
    return load_config([*words, f"privacy.noise={noise}", "privacy.user.noise_multiplier=1"])


def _memory_row(noise: str, size: int, cohort: int) -> Row:
    torch.set_num_threads(1)
    one_round(noise, min(size, 1000), 3)  # imports and first calls are not the round's
    before = resident()
    seconds = one_round(noise, size, cohort)
    models = None if before is None else ((resident(peak=True) or 0) - before) / (4 * size)
    what = f"a round, privacy.noise={noise}"
    return {"what": what, "replies": cohort, "models": models, "seconds": seconds}


def resident(*, peak: bool = False) -> int | None:
    """Bytes of this process in memory now, or at the most since it started; None if the system does not say."""
    status, name = Path("/proc/self/status"), "VmHWM:" if peak else "VmRSS:"
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _times(size: int, repetitions: int) -> list[Row]:
    """Milliseconds for a reply: ours, bare, and their ratio, for each way and part."""
    update = secure_source().normal(size).float()
    update *= 0.9 * CLIP_NORM / update.norm()
    ours = {noise: _ours(noise, size) for noise in NOISES}
    total, whole = np.zeros(size), np.zeros(size, dtype=np.int64)
    step = grid_for(CLIP_NORM, size).step
    content, raw = encode_reply(TrainReply(1, update, below=True)), update.numpy().tobytes()
    row, wild = update.numpy(), 3 * update
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "encode": (lambda: encode_reply(TrainReply(1, update, below=True)), lambda: row.tobytes()),
        "decode": (lambda: decode_reply(content, round_number=1, num_params=size), lambda: _read(raw)),
        "clip and sum, float": (lambda: ours["float"](update), lambda: _add(row, total)),
        "clip and sum, grid": (lambda: ours["grid"](update), lambda: _add_whole(row, whole, step)),
        "all four, float": (lambda: ours["float"](_wire(update).update), lambda: _add(_read(row.tobytes()), total)),
        "all four, grid": (
            lambda: ours["grid"](_wire(update).update),
            lambda: _add_whole(_read(row.tobytes()), whole, step),
        ),
        "all four, grid, against NumPy in float": (
            lambda: ours["grid"](_wire(update).update),
            lambda: _add(_read(row.tobytes()), total),
        ),
        "all four, float, clipped anew": (
            lambda: ours["float"](_wire(wild).update),
            lambda: _add(_read(wild.numpy().tobytes()), total),
        ),
        "all four, grid, clipped anew": (
            lambda: ours["grid"](_wire(wild).update),
            lambda: _add_whole(_read(wild.numpy().tobytes()), whole, step),
        ),
    }
    return [_compared(what, *pair, repetitions=repetitions) for what, pair in pairs.items()]


def _ours(noise: str, size: int) -> Callable[[Tensor], None]:
    on_grid = GridSum(size, CLIP_NORM, grid=grid_for(CLIP_NORM, size))
    total: ClippedSum | GridSum = on_grid if noise == "grid" else ClippedSum(size, CLIP_NORM)
    return lambda update: total.add(update.unsqueeze(0))


def _read(raw: bytes) -> Floats:
    values: Floats = np.frombuffer(raw, dtype=np.float32).copy()
    return values


def _add(row: Floats, total: NDArray[np.float64]) -> None:
    total += row * np.float32(min(1.0, CLIP_NORM / float(np.linalg.norm(row))))


def _add_whole(row: Floats, total: NDArray[np.int64], step: float) -> None:
    clipped = row * np.float32(min(1.0, CLIP_NORM / float(np.linalg.norm(row))))
    total += np.trunc(clipped * np.float32(1 / step)).astype(np.int64)


def _compared(what: str, ours: Callable[[], object], bare: Callable[[], object], *, repetitions: int) -> Row:
    times: list[list[tuple[float, float]]] = [[], []]
    for _ in range(repetitions + 1):
        for found, work in zip(times, (ours, bare), strict=True):
            started, worked = time.perf_counter(), time.process_time()
            work()
            found.append((time.perf_counter() - started, time.process_time() - worked))
    # The first of each warms up.
    here, there = ([1000 * median(kind) for kind in zip(*found[1:], strict=True)] for found in times)
    ratios = {"ratio": here[1] / there[1], "ratio_by_clock": here[0] / there[0]}
    return {"what": what, "ms": here[1], "numpy_ms": there[1], **ratios}
