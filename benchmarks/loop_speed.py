"""The cost of a private step for models as people write them, beside the plain gradient and the
best mode of Opacus.

    python -m benchmarks.loop_speed BERT nanoGPT        # these alone

It prints a row for each model, all measured in one process with one thread, by CPU time, in turns.
The clipped sum is compared with the gradient of the mean loss by autograd. A whole step of DPSGD is
compared with one of Opacus: both clip, draw noise and change the parameters, and none draws its
batch; the noise of Opacus comes from PyTorch's generator, that of DPSGD from the operating system's
randomness. Memory is the peak bytes of tensors, without the model; that of Opacus is its least in
any mode, which need not be the fastest one. The error is that of the clipped sum against a loop
over single examples, each given twice, since some forwards squeeze a batch of one away. A model
that is not installed or does not run has the reason instead.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.people_models import CASES, Case
from benchmarks.side_by_side import Call, Row, peak_bytes, times_in_turns
from discreet.cli.console import print_table
from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.layers.draws import no_draws
from discreet.per_example.objective import objective_of, rows_of
from discreet.per_example.per_example import clipped_gradient_sum, clipped_sum_of
from discreet.per_example.trial import Undrawn

SECONDS, SEED = 4.0, 20731
OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")
CLIP, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.1, 1e-3  # of every compared private step
# Errors of Opacus for an unsupported model.
UNSERVED = (ImportError, RuntimeError, AttributeError, TypeError, ValueError, LookupError)


class Step(NamedTuple):
    """A training step, a function that frees its gradients, and one that draws its batch."""

    take: Callable[[], object]
    clear: Callable[[], None]
    draw: Callable[[], object] = tuple


def rows(names: Sequence[str] = tuple(CASES), *, seconds: float = SECONDS) -> list[Row]:
    """A row for each model, and the medians of all; `seconds` for each measurement."""
    return with_medians(compared({name: CASES[name] for name in names}, seconds))


def with_medians(found: list[Row]) -> list[Row]:
    """The rows, and one with the medians of all that have a number."""
    columns = ("sum", "step", "Opacus/step", "memory", "Opacus/memory")
    held = {column: [row[column] for row in found if column in row] for column in columns}
    medians = {column: median(values) for column, values in held.items() if values}
    return [*found, {"model": "median", "load": os.getloadavg()[0]} | medians]


def compared(
    cases: Mapping[str, Callable[[], Case]],
    seconds: float,
    *,
    stepped: Callable[[Case], Step] | None = None,
) -> list[Row]:
    """A row for each case; `stepped`: makes the private step, if it is not that of DPSGD.

    `sum` and `step` are ratios to the plain gradient; `Opacus/step` is above 1 if Opacus takes
    longer. `memory` is that of the sum over that of the plain gradient; `Opacus/memory` is above 1
    if a step of Opacus needs more than ours."""
    threads, log, said = torch.get_num_threads(), logging.getLogger("discreet"), _Said()
    torch.set_num_threads(1)
    log.addHandler(said)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus warns at every layer
            return [
                {"model": name} | _row(cases[name], seconds, said, stepped or private_step)
                for name in cases
            ]
    finally:
        log.removeHandler(said)
        torch.set_num_threads(threads)


class _Said(logging.Handler):
    """Records how the gradients of the last model were computed: "watched", unless the log says
    otherwise."""

    way = "watched"

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) == 3:
            self.way = f"{record.args[1]}: {record.args[2]}"


def _row(
    build: Callable[[], Case], seconds: float, said: _Said, stepped: Callable[[Case], Step]
) -> Row:
    said.way = "watched"
    try:
        case = seeded(build)
        clipped_sum(case, CLIP)  # also tries the model
    except (ImportError, ValueError) as error:
        return {"way": str(error)}
    calls: dict[str, Call] = {
        "plain": lambda: plain_gradient(case),
        "sum": lambda: clipped_sum(case, CLIP),
    }
    plain, ours = map(peak_bytes, calls.values())
    step = stepped(seeded(build))
    calls["step"], peak = step.take, _peak(step)
    opacus, theirs, mode = _opacus(build)
    calls |= {"Opacus": opacus} if opacus else {}
    times = times_in_turns(calls, seconds, before={"step": step.draw})
    ms = {what: median(found) for what, found in times.items()}
    row: Row = {
        "batch": len(case.targets),
        "error": error_of(case),
        "plain ms": ms["plain"],
        "plain MB": plain / 1e6,
    }
    row |= {
        "sum": ms["sum"] / ms["plain"],
        "step": ms["step"] / ms["plain"],
        "memory": ours / plain,
        "Opacus": mode,
    }
    row |= (
        {"Opacus/step": ms["Opacus"] / ms["step"], "Opacus/memory": theirs / peak} if opacus else {}
    )
    return row | {"way": said.way}


def seeded(build: Callable[[], Case]) -> Case:
    """The same case each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return build()


def _peak(step: Step) -> int:
    """The peak bytes of two successive steps with their batches, starting from a model without
    gradients, after a warm-up step."""
    step.draw()
    step.take()
    step.clear()
    return peak_bytes(lambda: (step.draw(), step.take(), step.draw(), step.take()))


def _opacus(build: Callable[[], Case]) -> tuple[Call | None, int, str]:
    """Opacus' fastest step, the least memory of any mode, and the mode's name, or the reason why
    none runs."""
    found, reason = [], ""
    for mode in OPACUS_MODES:
        try:
            step = opacus_step(mode, seeded(build))
            peak, begin = _peak(step), time.process_time()
        except UNSERVED as error:
            reason = reason or f"none: {error}"[:100]
        else:
            step.take()
            found.append((time.process_time() - begin, mode, step.take, peak))
    if not found:
        return None, 0, reason
    _, mode, best, _ = min(found)
    return best, min(peak for *_, peak in found), mode


def plain_gradient(case: Case) -> tuple[Tensor, ...]:
    """The gradient of the mean loss, as in a step of SGD."""
    trained = [value for value in case.model.parameters() if value.requires_grad]
    loss = case.loss(case.outputs(case.model), case.targets).mean()
    return torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)


def clipped_sum(case: Case, clip_norm: float) -> tuple[Tensor, Tensor]:
    """The clipped sum of a DPSGD step before the noise, and the norms."""
    inputs, targets, loss = case.inputs, case.targets, case.loss
    return clipped_gradient_sum(case.model, inputs, targets=targets, clip_norm=clip_norm, loss=loss)


def error_of(case: Case) -> float:
    """The relative error of the sum with half of the norms clipped, against a loop over examples;
    dropout keeps everything in both."""
    with Undrawn():
        clip = float(_without_draws(case, 1.0)[1].median())
        found, wanted = _without_draws(case, clip)[0], torch.zeros(())
        for place in range(len(case.targets)):
            twice = [place, place]
            one = case._replace(inputs=rows_of(case.inputs, twice), targets=case.targets[twice])
            whole = torch.cat([part.flatten() for part in plain_gradient(one)])
            wanted = wanted + whole * (clip / whole.norm()).clamp(max=1)
    return float((found - wanted).norm() / wanted.norm())


def _without_draws(case: Case, clip_norm: float) -> tuple[Tensor, Tensor]:
    """As `clipped_sum`, without masks of the operating system's randomness."""
    objective = objective_of(case.model, case.loss)
    draws = no_draws(len(case.targets))
    return clipped_sum_of(objective, case.inputs, case.targets, clip_norm, draws)


def private_step(case: Case) -> Step:
    """`DPSGD.step` on the same batch each time: every example joins with probability 1."""
    trained, count = (
        [value for value in case.model.parameters() if value.requires_grad],
        len(case.targets),
    )
    optimizer, privacy = (
        torch.optim.SGD(trained, lr=LEARNING_RATE),
        LoopPrivacy(noise_multiplier=NOISE_MULTIPLIER),
    )
    data = [(rows_of(case.inputs, place), case.targets[place]) for place in range(count)]
    settings = {"batch_size": count, "epochs": 10**6, "delta": 1e-5, "clip_norm": CLIP}
    loop = DPSGD(case.model, optimizer, data, **settings, loss=case.loss, privacy=privacy)  # type: ignore[arg-type]
    batches, drawn = iter(loop), list[Any]()
    return Step(
        lambda: loop.step(*drawn.pop()), optimizer.zero_grad, lambda: drawn.append(next(batches))
    )


@dataclass
class _Criterion:
    """A loss with one value an example in Opacus' form: its mean, unless `reduction` is "none"."""

    loss: Callable[[Any, Any], Tensor]
    reduction: str = "mean"

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        losses = self.loss(outputs, targets)
        return losses if self.reduction == "none" else losses.mean()


def opacus_step(mode: str, case: Case) -> Step:
    """One step as Opacus documents it, on the case's batch, with the model of its
    `get_compatible_module`, which replaces PyTorch's attention and recurrent layers by its own."""
    engine, count = import_module("opacus").PrivacyEngine(), len(case.targets)
    model = engine.get_compatible_module(case.model)
    # In-place activations break Opacus' hooks, so they are switched off.
    for layer in model.modules():
        layer.__dict__.update({"inplace": False} if getattr(layer, "inplace", False) else {})
    trained = [value for value in model.parameters() if value.requires_grad]
    wrapped, optimizer, *more = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained, lr=LEARNING_RATE),
        criterion=_Criterion(case.loss),
        data_loader=DataLoader(TensorDataset(torch.zeros(count)), batch_size=count),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        batch_first=case.batch_first,
        grad_sample_mode=mode,
    )
    criterion = more[0] if mode == "ghost" else _Criterion(case.loss)

    def step() -> None:
        optimizer.zero_grad()
        criterion(case.outputs(wrapped), case.targets).backward()
        optimizer.step()

    return Step(step, optimizer.zero_grad)


if __name__ == "__main__":
    print_table(rows(sys.argv[1:] or tuple(CASES)))
