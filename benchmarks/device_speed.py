"""Measures Discreet on one device, a GPU above all: sums, steps, cohorts, noise, and a run that is killed.

It ends within `minutes`, prints a table for each section, and writes what it has to one JSON file after each of them.
A library that is missing, a model that does not run and a section for which no time is left are named, and the others
go on.

- `sums`: clipped gradient sums on the device beside those of the CPU, for the models of `people_models`: the relative
  error should be at most 1e-4.
- `steps`: the plain step, DPSGD's and Opacus', each at a batch that fills the device; examples a second, and the most
  memory that was allocated.
- `cohorts`: virtual clients a second, trained together, and by a loop over the clients on the same device.
- `noise`: normal values a second from the operating system's randomness, beside PyTorch's generator.
- `run`: `discreet simulate` on the device, killed after a few rounds and resumed.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    SEED,
    UNSERVED,
    Step,
    clipped_sum,
    opacus_step,
    private_step,
)
from benchmarks.people_models import CASES, Case
from benchmarks.side_by_side import Call, Row, peak_bytes
from discreet.cli.console import print_table
from discreet.per_example.trial import Undrawn
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import secure_source

SHARES = {"sums": 0.25, "steps": 0.75, "cohorts": 0.88, "noise": 0.9, "run": 1.0}  # of the time, by each section's end
FILLED = 0.5  # of the device's memory, by the clipped sum as it was measured at smaller batches
LARGEST_BATCH, SMALL_BATCH, PROBE = 4096, 16, 8
TURNS = 5  # of each call that is timed
OPACUS_MODES = ("hooks", "ghost", "ew")
NOISE_VALUES = {"cpu": 2_000_000, "cuda": 20_000_000}
RUN_WORDS = ("rounds=12", "seed=null", "data.name=digits", "privacy.user.target_epsilon=8")
KILLED_AFTER = 4  # rounds


@dataclass(frozen=True)
class Bench:
    """The device, the sizes, and the time at which all has to be done, by `time.monotonic`."""

    device: torch.device
    small: bool
    end: float
    seconds: float

    def has_time(self, section: str) -> bool:
        """True before the end of that section's share of the time."""
        return time.monotonic() < self.end - (1 - SHARES[section]) * self.seconds

    def synchronise(self) -> None:
        """Waits for what the device still computes."""
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
                json_file.write_text(json.dumps(results, indent=2) + "\n")
        print_table(results[name])
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return results


def machine(device: torch.device) -> dict[str, Any]:
    """The names and versions that a number from this machine needs beside it."""
    found: dict[str, Any] = {"device": str(device), "cores": os.cpu_count(), "python": platform.python_version()}
    found["torch"] = torch.__version__
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found |= {"card": card.name, "memory_gb": round(card.total_memory / 1e9, 1), "cuda": torch.version.cuda}
    return found


def sum_rows(bench: Bench) -> Iterator[Row]:
    """The relative error of each model's clipped sum to the CPU's, with half of the norms clipped."""
    for name, build in CASES.items():
        if not bench.has_time("sums"):
            yield {"model": name, "missing": "no time left"}
            continue
        try:
            with _exact_products():
                yield {"model": name, "error": _sum_error(build, bench.device)}
        except UNSERVED as error:
            yield {"model": name, "missing": _reason(error)}
        _free(bench)


def _sum_error(build: Callable[[], Case], device: torch.device) -> float:
    case = _seeded(build)
    with Undrawn():
        clip_norm = float(clipped_sum(case, 1.0)[1].median())
        wanted = clipped_sum(case, clip_norm)[0]
        found = clipped_sum(on_device(case, device), clip_norm)[0].cpu()
    return float((found - wanted).norm() / wanted.norm())


@contextmanager
def _exact_products() -> Iterator[None]:
    """Within it a GPU multiplies in float32, convolutions too: TF32 has 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def step_rows(bench: Bench) -> Iterator[Row]:
    """The plain step, DPSGD's and Opacus' of each model, in examples a second."""
    for name, make in device_cases(small=bench.small).items():
        if not bench.has_time("steps"):
            yield {"model": name, "missing": "no time left"}
            continue
        try:
            yield {"model": name} | _steps(make, bench)
        except UNSERVED as error:
            yield {"model": name, "missing": _reason(error)}
        _free(bench)


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
    calls: dict[str, Call] = {"plain": _plain_step(case), "sum": lambda: clipped_sum(case, CLIP)}
    calls["DPSGD"] = _drawn_step(private_step(_made(make, count, bench.device)))
    return _timed(calls, count, bench)


def _timed(calls: dict[str, Call], count: int, bench: Bench) -> Row:
    row: Row = {}
    for what, call in calls.items():
        row[f"{what} ms"] = _milliseconds(call, bench)
        row[f"{what} examples/s"] = 1e3 * count / row[f"{what} ms"]
        row[f"{what} MB"] = _peak_bytes(call, bench) / 1e6
    return row


def _opacus_row(make: Make, count: int, bench: Bench) -> Row:
    """Opacus' fastest mode, at the largest batch of count, count / 2, ... that it can hold."""
    mode, reason = _opacus_mode(make, bench)
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
    step = opacus_step(mode, _made(make, count, bench.device))
    return _timed({"Opacus": step.take}, count, bench)


def _opacus_mode(make: Make, bench: Bench) -> tuple[str | None, str]:
    """The mode that is fastest at a small batch, or None with the reason why none runs."""
    found, reason = [], ""
    for mode in OPACUS_MODES:
        try:
            step = opacus_step(mode, _made(make, SMALL_BATCH, bench.device))
            found.append((_milliseconds(step.take, bench), mode))
        except UNSERVED as error:
            reason = reason or _reason(error)
        _free(bench)
    return (min(found)[1], "") if found else (None, reason)


def _plain_step(case: Case) -> Call:
    trained = [value for value in case.model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = case.loss(case.outputs(case.model), case.targets).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _drawn_step(step: Step) -> Call:
    """The step and the draw of its batch, which is not the whole of a loader's work: all rows are on the device."""

    def take() -> None:
        step.draw()
        step.take()

    return take


def _filling_batch(make: Make, bench: Bench) -> int:
    """The largest power of two at which the clipped sum should fill the share `FILLED` of the device."""
    if bench.small or bench.device.type != "cuda":
        return SMALL_BATCH
    peaks = []
    for count in (PROBE, 2 * PROBE):
        case = _made(make, count, bench.device)
        clipped_sum(case, 1.0)
        peaks.append(_peak_bytes(lambda case=case: clipped_sum(case, 1.0), bench))  # type: ignore[misc]
        del case
        _free(bench)
    each = max((peaks[1] - peaks[0]) / PROBE, 1.0)
    room = FILLED * torch.cuda.mem_get_info(bench.device)[0] - peaks[0]
    batch = PROBE
    while 2 * batch <= LARGEST_BATCH and 2 * batch * each <= room:
        batch *= 2
    return batch


def _milliseconds(call: Call, bench: Bench) -> float:
    """The median time of a call by the clock, after one to warm up."""
    call()
    bench.synchronise()
    times = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        call()
        bench.synchronise()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)


def _peak_bytes(call: Call, bench: Bench) -> int:
    """The most bytes of tensors alive at once inside a call, beside those that were there before."""
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
    for name in ("logistic_regression", "mlp", "cnn"):
        if not bench.has_time("cohorts"):
            yield {"model": name, "missing": "no time left"}
            continue
        try:
            yield {"model": name} | _cohorts(name, cohort, bench)
        except UNSERVED as error:
            yield {"model": name, "missing": _reason(error)}
        _free(bench)


def _cohorts(name: str, cohort: int, bench: Bench) -> Row:
    ways = cohort_speed.device_ways(name, clients=cohort, device=str(bench.device))
    few = max(cohort // 100, 2)
    together = _milliseconds(lambda: ways["together"](range(cohort)), bench)
    alone = _milliseconds(lambda: ways["loop"](range(few)), bench)
    row: Row = {"clients": cohort, "together/s": 1e3 * cohort / together, "loop/s": 1e3 * few / alone}
    row["together/loop"] = row["together/s"] / row["loop/s"]
    return row


def noise_rows(bench: Bench) -> Iterator[Row]:
    """Normal values a second for a sum on the device."""
    total = torch.zeros(NOISE_VALUES["cpu" if bench.small else bench.device.type], device=bench.device)
    source, mechanism = secure_source(), Gaussian(NOISE_MULTIPLIER)
    secure = _milliseconds(lambda: mechanism.add_noise(total, 1.0, source), bench)
    torchs = _milliseconds(lambda: total + torch.randn_like(total), bench)
    row: Row = {"values": len(total), "secure values/s": 1e3 * len(total) / secure}
    yield row | {"torch values/s": 1e3 * len(total) / torchs, "secure/torch": secure / torchs}


def run_rows(bench: Bench) -> Iterator[Row]:
    """A run on the device, killed after a few rounds, and what it ends with once it is resumed."""
    with TemporaryDirectory() as folder:
        output = str(Path(folder) / "run")
        words = [*RUN_WORDS, f"device={bench.device}", f"output_dir={output}"]
        killed = _rounds_until_killed(words)
        resumed = subprocess.run(
            _command([f"output_dir={output}", "resume=true"]), capture_output=True, text=True, check=False, timeout=300
        )
    rounds = [line for line in resumed.stdout.splitlines() if line.startswith("round ")]
    row: Row = {"killed after": killed, "exit code": resumed.returncode, "last": rounds[-1] if rounds else ""}
    if resumed.returncode:
        row["missing"] = (resumed.stdout + resumed.stderr)[-500:]
    yield row


def _rounds_until_killed(words: list[str]) -> int:
    """Starts a run, kills it when it has said its fourth round, and returns the number of rounds that it said."""
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
    return on_device(_seeded(lambda: make(count)), device)


def on_device(case: Case, device: torch.device) -> Case:
    """The case with its model and its batch there; the model is moved, not copied."""
    inputs, targets = tree_map_only(torch.Tensor, lambda value: value.to(device), (case.inputs, case.targets))
    return case._replace(model=case.model.to(device), inputs=inputs, targets=targets)


def _seeded(build: Callable[[], Case]) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return build()


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    """The first line of an error and its type."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
