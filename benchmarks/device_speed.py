"""Measures Discreet on one device, mainly a GPU: sums, steps, cohorts, noise, and a killed and
resumed run.

It ends within `minutes`, prints a table for each section, and writes the results so far to one JSON
file after each of them. A missing library, a model that does not run and a section without time are
named, and the others go on.

- `sums`: clipped gradient sums on the device beside those of the CPU, for the models of
  `people_models`: the relative error should be at most 1e-4.
- `steps`: the plain step, DPSGD's and Opacus', each at a batch that fills the device; examples a
  second, and the peak of allocated memory.
- `cohorts`: virtual clients a second, trained together, and by a loop over the clients on the same
  device.
- `noise`: normal values a second from the operating system's randomness, beside PyTorch's
  generator.
- `run`: `discreet simulate` on the device, killed after a few rounds and resumed.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from benchmarks import cohort_speed
from benchmarks.device_models import Make, device_cases
from benchmarks.loop_speed import (
    CLIP,
    NOISE_MULTIPLIER,
    UNSERVED,
    Step,
    clipped_sum,
    opacus_step,
    private_step,
    seeded,
)
from benchmarks.people_models import CASES, Case
from benchmarks.side_by_side import Call, Row, peak_bytes
from discreet.cli.console import print_table
from discreet.per_example.trial import Undrawn
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import secure_source
from discreet.run_files.whole_files import replace_file

# The share of the time at which each section must end.
SHARES = {
    "sums": 0.25,
    "steps": 0.75,
    "cohorts": 0.88,
    "noise": 0.9,
    "run": 1.0,
}
# Share of the device's memory for the clipped sum, extrapolated from smaller batches.
FILLED = 0.5
LARGEST_BATCH, MODE_BATCH, SMALL_BATCH, PROBE = 4096, 128, 16, 8
LONGEST_MS = 1000.0  # longest time of a clipped sum, in ms
TURNS = 5  # number of timed calls
OPACUS_MODES = ("hooks", "ghost", "ew")
NOISE_VALUES = {"cpu": 2_000_000, "cuda": 20_000_000}
RUN_WORDS = ("rounds=12", "seed=null", "data.name=digits", "privacy.user.target_epsilon=8")
KILLED_AFTER = 4  # rounds
# Errors of a library that does not support a model.
FAILED = (
    *UNSERVED,
    AssertionError,
    TimeoutError,
)


@dataclass(frozen=True)
class Bench:
    """The device, the sizes, and the time at which everything must be done, by
    `time.monotonic`."""

    device: torch.device
    small: bool
    end: float
    seconds: float

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """A context in which TimeoutError is raised, at most once, when the section's share of the
        time is over."""
        left = self.end - (1 - SHARES[section]) * self.seconds - time.monotonic()
        if left <= 0:
            # An alarm in a callback of the garbage collector would be lost.
            raise TimeoutError("the time of this section is over")
        before = signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def synchronise(self) -> None:
        """Waits until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(device: str, *, small: bool, minutes: float, json_file: Path | None) -> dict[str, Any]:
    """Measures all sections, prints each, and writes them to `json_file` as they are done."""
    seconds = 60 * minutes
    bench = Bench(torch.device(device), small, time.monotonic() + seconds, seconds)
    results: dict[str, Any] = {"machine": machine(bench.device), "small": small}
    print(json.dumps(results["machine"]), flush=True)
    sections: dict[str, Callable[[Bench], Iterator[Row]]] = {
        "sums": sum_rows,
        "steps": step_rows,
        "cohorts": cohort_rows,
        "noise": noise_rows,
        "run": run_rows,
    }
    for name, rows in sections.items():
        results[name] = []
        print(name, flush=True)
        begin = time.monotonic()
        for row in rows(bench):
            results[name].append(row)
            print(json.dumps(row), flush=True)
            if json_file is not None:
                replace_file(json_file, (json.dumps(results, indent=2) + "\n").encode())
        print_table(results[name])
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return results


def machine(device: torch.device) -> dict[str, Any]:
    """The names and versions to report with the numbers of this machine."""
    found: dict[str, Any] = {
        "device": str(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    found["torch"] = torch.__version__
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {
            "card": card.name,
            "memory_gb": round(card.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
            # Of plain steps and Opacus' steps: products of a clipped sum have float32's bits.
            "tf32_of_convolutions": torch.backends.cudnn.allow_tf32,
            "tf32_of_matrices": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def _out_of_time(number: int, frame: object) -> None:
    raise TimeoutError("the time of this section is over")


def _rows_within(bench: Bench, section: str, cases: dict[str, Callable[[], Row]]) -> Iterator[Row]:
    """A row for each case, with the reason if it could not be measured."""
    for name, measured in cases.items():
        try:
            with bench.within(section):
                yield {"model": name} | measured()
        except FAILED as error:
            yield {"model": name, "missing": _reason(error)}
        _free(bench)


def sum_rows(bench: Bench) -> Iterator[Row]:
    """The relative error of each model's clipped sum to the CPU's, with half of the norms
    clipped."""
    cases: dict[str, Callable[[], Row]] = {
        name: partial(_sum_row, CASES[name], bench) for name in CASES
    }
    yield from _rows_within(bench, "sums", cases)


def _sum_row(build: Callable[[], Case], bench: Bench) -> Row:
    return {"error": _sum_error(build, bench.device)}


def _sum_error(build: Callable[[], Case], device: torch.device) -> float:
    case = seeded(build)
    with Undrawn():
        clip_norm = float(clipped_sum(case, 1.0)[1].median())
        wanted = clipped_sum(case, clip_norm)[0]
        found = clipped_sum(on_device(case, device), clip_norm)[0].cpu()
    return float((found - wanted).norm() / wanted.norm())


def step_rows(bench: Bench) -> Iterator[Row]:
    """For each model the plain step, DPSGD's and Opacus', in examples a second."""
    makers = device_cases(small=bench.small)
    yield from _rows_within(
        bench, "steps", {name: partial(_steps, make, bench) for name, make in makers.items()}
    )


def _steps(make: Make, bench: Bench) -> Row:
    count = _filling_batch(make, bench)
    row: Row = {"batch": count}
    row |= _own_steps(make, count, bench)
    _free(bench)
    row |= _opacus_row(make, count, bench)
    row["DPSGD/plain ms"] = row["DPSGD ms"] / row["plain ms"]
    if "Opacus ms" in row:
        row["DPSGD/Opacus examples/s"] = row["DPSGD examples/s"] / row["Opacus examples/s"]
    return row


def _own_steps(make: Make, count: int, bench: Bench) -> Row:
    """The plain step, the clipped sum, and the step of DPSGD."""
    case = _made(make, count, bench.device)
    plain, total = (
        Step(_plain_step(case), _nothing),
        Step(lambda: clipped_sum(case, CLIP), _nothing),
    )
    row = _timed({"plain": plain, "sum": total}, count, bench)
    return row | _timed({"DPSGD": private_step(_made(make, count, bench.device))}, count, bench)


def _timed(steps: dict[str, Step], count: int, bench: Bench) -> Row:
    """Times and memory of steps; drawing the batch before each is not timed."""
    row: Row = {}
    for what, step in steps.items():
        row[f"{what} ms"] = _milliseconds(step.take, bench, before=step.draw)
        row[f"{what} examples/s"] = 1e3 * count / row[f"{what} ms"]
        step.draw()
        row[f"{what} MB"] = _peak_bytes(step.take, bench) / 1e6
    return row


def _opacus_row(make: Make, count: int, bench: Bench) -> Row:
    """Opacus' fastest mode, at the largest batch of count, count / 2, ... that it can hold."""
    mode, reason = _opacus_mode(make, min(count, MODE_BATCH), bench)
    if mode is None:
        return {"Opacus": f"none: {reason}"}
    while count:
        try:
            return {"Opacus": mode, "Opacus batch": count} | _opacus_times(mode, make, count, bench)
        except torch.cuda.OutOfMemoryError:
            count //= 2
        _free(bench)
    return {"Opacus": "none: no batch fits"}


def _opacus_times(mode: str, make: Make, count: int, bench: Bench) -> Row:
    return _timed({"Opacus": opacus_step(mode, _made(make, count, bench.device))}, count, bench)


def _opacus_mode(make: Make, count: int, bench: Bench) -> tuple[str | None, str]:
    """The fastest mode at this batch size, or None with the reason why none runs."""
    found, reason = [], ""
    for mode in OPACUS_MODES:
        try:
            step = opacus_step(mode, _made(make, count, bench.device))
            found.append((_milliseconds(step.take, bench), mode))
        except FAILED as error:
            reason = reason or _reason(error)
        _free(bench)
    return (min(found)[1], "") if found else (None, reason)


def _nothing() -> None:
    """Does nothing, for a step that has nothing to clear."""


def _plain_step(case: Case) -> Call:
    trained = [value for value in case.model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = case.loss(case.outputs(case.model), case.targets).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _filling_batch(make: Make, bench: Bench) -> int:
    """The largest power of two at which the clipped sum is expected to fit the share `FILLED` of
    the device's memory and to take at most a second."""
    if bench.small or bench.device.type != "cuda":
        return SMALL_BATCH
    (peak, before), (twice, after) = (_probed(make, count, bench) for count in (PROBE, 2 * PROBE))
    each = max((twice - peak) / PROBE, 1.0)
    room = FILLED * torch.cuda.mem_get_info(bench.device)[0] - peak
    slow = max((after - before) / PROBE, 1e-6)
    batch = PROBE
    while (
        2 * batch <= LARGEST_BATCH and 2 * batch * each <= room and 2 * batch * slow <= LONGEST_MS
    ):
        batch *= 2
    return batch


def _probed(make: Make, count: int, bench: Bench) -> tuple[int, float]:
    """The peak bytes and the milliseconds of a clipped sum."""
    case = _made(make, count, bench.device)
    milliseconds = _milliseconds(lambda: clipped_sum(case, CLIP), bench)
    peak = _peak_bytes(lambda: clipped_sum(case, CLIP), bench)
    _free(bench)
    return peak, milliseconds


def _milliseconds(call: Call, bench: Bench, before: Call = tuple) -> float:
    """The median wall-clock time of a call, after a warm-up call; `before` is called before each,
    untimed."""
    before()
    call()
    times = []
    for _ in range(TURNS):
        before()
        bench.synchronise()
        begin = time.perf_counter()
        call()
        bench.synchronise()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


def _peak_bytes(call: Call, bench: Bench) -> int:
    """The peak bytes of tensors during a call, above those before it."""
    if bench.device.type != "cuda":
        return peak_bytes(call)
    bench.synchronise()
    torch.cuda.reset_peak_memory_stats(bench.device)
    before = torch.cuda.memory_allocated(bench.device)
    call()
    bench.synchronise()
    return torch.cuda.max_memory_allocated(bench.device) - before


def cohort_rows(bench: Bench) -> Iterator[Row]:
    """Clients a second, trained together and in a loop."""
    cohort = 20 if bench.small else 1000
    models = ("logistic_regression", "mlp", "cnn")
    yield from _rows_within(
        bench, "cohorts", {name: partial(_cohorts, name, cohort, bench) for name in models}
    )


def _cohorts(name: str, cohort: int, bench: Bench) -> Row:
    ways = cohort_speed.device_ways(name, clients=cohort, device=str(bench.device))
    few = max(cohort // 100, 2)
    together = _milliseconds(lambda: ways["together"](range(cohort)), bench)
    alone = _milliseconds(lambda: ways["loop"](range(few)), bench)
    row: Row = {
        "clients": cohort,
        "together/s": 1e3 * cohort / together,
        "loop/s": 1e3 * few / alone,
    }
    row["together/loop"] = row["together/s"] / row["loop/s"]
    return row


def noise_rows(bench: Bench) -> Iterator[Row]:
    """Normal values a second for a sum on the device."""
    total = torch.zeros(
        NOISE_VALUES["cpu" if bench.small else bench.device.type], device=bench.device
    )
    source, mechanism = secure_source(), Gaussian(NOISE_MULTIPLIER)
    secure = _milliseconds(lambda: mechanism.add_noise(total, 1.0, source), bench)
    torchs = _milliseconds(lambda: total + torch.randn_like(total), bench)
    row: Row = {"values": len(total), "secure values/s": 1e3 * len(total) / secure}
    yield row | {"torch values/s": 1e3 * len(total) / torchs, "secure/torch": secure / torchs}


def run_rows(bench: Bench) -> Iterator[Row]:
    """A run on the device, killed after a few rounds, and its result after it was resumed."""
    with TemporaryDirectory() as folder:
        output = str(Path(folder) / "run")
        words = [*RUN_WORDS, f"device={bench.device}", f"output_dir={output}"]
        killed = _rounds_until_killed(words)
        resumed = subprocess.run(
            _command([f"output_dir={output}", "resume=true"]),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    rounds = [line for line in resumed.stdout.splitlines() if line.startswith("round ")]
    row: Row = {
        "killed after": killed,
        "exit code": resumed.returncode,
        "last": rounds[-1] if rounds else "",
    }
    if resumed.returncode:
        row["missing"] = (resumed.stdout + resumed.stderr)[-500:]
    yield row


def _rounds_until_killed(words: list[str]) -> int:
    """Starts a run, kills it when it has logged its fourth round, and returns the number of logged
    rounds."""
    rounds = 0
    with subprocess.Popen(_command(words), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rounds += line.startswith("round ")
            if rounds == KILLED_AFTER:
                process.kill()
                break
    return rounds


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "discreet", "simulate", *words]


def _made(make: Make, count: int, device: torch.device) -> Case:
    return on_device(seeded(lambda: make(count)), device)


def on_device(case: Case, device: torch.device) -> Case:
    """The case with its model and batch on a device; the model is moved, not copied."""
    inputs, targets = tree_map_only(
        torch.Tensor, lambda value: value.to(device), (case.inputs, case.targets)
    )
    return case._replace(model=case.model.to(device), inputs=inputs, targets=targets)


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    """The first line of an error and its type."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
