"""What a private step costs in a loop of one's own: `DPSGD.step` beside the plain step and Opacus in each of its modes.

    python -m benchmarks.loop_speed --json times.json

Three models with a forward of their own: a small ResNet with GroupNorm, a transformer encoder, a mean of embeddings.
All are timed in turns, in one process with one thread, by processor time, so that other work on the machine weighs on
all alike. Times are medians. A step goes from a batch to changed parameters; drawing the batch is not in it. Opacus
draws its noise from PyTorch's generator, DPSGD from the operating system's randomness: the row "noise" says what that
is of a step. Opacus' own rewriting (`ModuleValidator.fix`) puts its attention in place of PyTorch's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.opacus_steps import OPACUS_MODES, fixed_for_opacus, opacus_step
from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.step_account import LoopPrivacy
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import secure_source

CLIP, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.1, 0.1
ROUNDS = 15

Row = dict[str, Any]
Step = Callable[[], float]  # takes one step, and gives its seconds of processor time


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, added to what came in (He et al. 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, after), nn.GroupNorm(4, after)])
        self.short = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.first(inputs)))
        return functional.relu(self.norms[1](self.second(inner)) + self.short(inputs))


class ResNet(nn.Module):
    """A stem, three residual blocks of 16, 32 and 64 channels, and the mean over positions: 78 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16)
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
        self.output = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        inner = self.blocks(functional.relu(self.norm(self.stem(inputs))))
        outputs: Tensor = self.output(inner.mean((2, 3)))
        return outputs


class Encoder(nn.Module):
    """Token and position embeddings, two transformer layers of 64, the mean over positions."""

    def __init__(self, tokens: int = 1000, steps: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, 64), nn.Parameter(0.02 * torch.randn(steps, 64))
        layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers, self.output = nn.Sequential(*layers), nn.Linear(64, 2)

    def forward(self, ids: Tensor) -> Tensor:
        inner = self.layers(self.tokens(ids) + self.positions)
        outputs: Tensor = self.output(inner.mean(1))
        return outputs


class MeanOfEmbeddings(nn.Module):
    """The mean of word vectors, and two linear layers: as in Opacus' example on IMDb, with 10,000 words."""

    def __init__(self, tokens: int = 10_000) -> None:
        super().__init__()
        self.tokens, self.inner, self.output = nn.Embedding(tokens, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.output(functional.relu(self.inner(self.tokens(ids).mean(1))))
        return outputs


def _images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def _ids(tokens: int, steps: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(tokens, (count, steps))


Case = tuple[Callable[[], nn.Module], Callable[[int], Tensor], int]
CASES: dict[str, Case] = {
    "resnet": (ResNet, _images, 64),
    "transformer": (Encoder, _ids(1000, 32), 64),
    "embedding": (MeanOfEmbeddings, _ids(10_000, 256), 256),
}


def rows(models: Sequence[str] = tuple(CASES), *, rounds: int = ROUNDS) -> list[Row]:
    """Rows of model, batch, what, ms, the ratio to the plain step and the ratio to Opacus' best mode, which is above 1
    if Opacus takes longer. A peer that is not there has its reason."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            for said in ("Full backward hook is firing", "In CPU autocast"):  # by Opacus, at every layer
                warnings.filterwarnings("ignore", message=said)
            return [row for name in models for row in _case(name, rounds)]
    finally:
        torch.set_num_threads(threads)


def _case(name: str, rounds: int) -> list[Row]:
    build, draw, count = CASES[name]
    batch = draw(count), torch.randint(2, (count,))
    steps, missing = {"plain step": plain_step(build(), batch), "DPSGD.step": private_step(build(), batch)}, list[str]()
    if importlib.util.find_spec("opacus") is None:
        missing = [f"Opacus {mode}" for mode in OPACUS_MODES]
    else:
        settings = {"clip": CLIP, "noise_multiplier": NOISE_MULTIPLIER, "learning_rate": LEARNING_RATE}
        for mode in OPACUS_MODES:
            steps[f"Opacus {mode}"] = timed(opacus_step(mode, fixed_for_opacus(build()), batch, settings=settings))
    steps["noise"] = noise_alone(build())
    found = {what: 1e3 * seconds for what, seconds in _medians(steps, rounds).items()}
    peers = [ms for what, ms in found.items() if what.startswith("Opacus")]
    case = {"model": name, "batch": count, "load": os.getloadavg()[0]}
    timed_rows = [
        case | {"what": what, "ms": ms, "of plain": ms / found["plain step"], "Opacus is": min(peers) / ms}
        if peers
        else case | {"what": what, "ms": ms, "of plain": ms / found["plain step"]}
        for what, ms in found.items()
    ]
    return timed_rows + [case | {"what": what, "reason": "opacus is not installed"} for what in missing]


def timed(step: Callable[[], object]) -> Step:
    """The same, with its processor time."""

    def call() -> float:
        begin = time.process_time()
        step()
        return time.process_time() - begin

    return call


def plain_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """One step of SGD by torch.optim."""
    optimizer, (inputs, targets) = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), batch

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timed(step)


def private_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """One `DPSGD.step` on the same batch each time: every example joins with the chance 1."""
    optimizer, count = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), len(batch[0])
    privacy, data = LoopPrivacy(noise_multiplier=NOISE_MULTIPLIER), TensorDataset(*batch)
    loop = DPSGD(model, optimizer, data, batch_size=count, epochs=10**6, delta=1e-5, clip_norm=CLIP, privacy=privacy)
    batches = iter(loop)

    def call() -> float:
        inputs, targets = next(batches)
        begin = time.process_time()
        loop.step(inputs, targets)
        return time.process_time() - begin

    return call


def noise_alone(model: nn.Module) -> Step:
    """The noise of one step of DPSGD."""
    total = torch.zeros(sum(value.numel() for value in model.parameters()))
    mechanism, source = Gaussian(NOISE_MULTIPLIER), secure_source()
    return timed(lambda: mechanism.add_noise(total, CLIP, source))


def _medians(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of each step; they take turns, a few calls at a time, after one that is not counted."""
    times: dict[str, list[float]] = {what: [] for what in steps}
    for turn in range(rounds + 1):
        for what, step in steps.items():
            spent = [step() for _ in range(3)]
            times[what] += spent[1:] if turn else []
    return {what: statistics.median(spent) for what, spent in times.items()}


def table(found: Sequence[Row]) -> Table:
    """The rows as a table."""
    shown = Table("model", "batch", "what", "ms", "of plain", "Opacus' best / this")
    for row in found:
        numbers = [f"{row[name]:.2f}" if name in row else "-" for name in ("ms", "of plain", "Opacus is")]
        shown.add_row(row["model"], str(row["batch"]), row["what"], *numbers)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description="DPSGD.step beside the plain step and Opacus.")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    chosen = parser.parse_args(arguments)
    found = rows(chosen.models, rounds=chosen.rounds)
    Console().print(table(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
