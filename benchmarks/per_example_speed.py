"""What per-example clipping costs: clipped gradient sums against the plain gradient, and whole steps with noise.

    python -m benchmarks.per_example_speed --json times.json

Everything that is compared runs in turns, in one process and with the same threads, so that a busy machine slows all of
it alike. Times are medians; the ratio is of medians, to the plain gradient for gradients and to the plain step for
steps, and beside it stands the ratio of the fastest times. Opacus is compared if it is installed (extra [bench]).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from benchmarks.opacus_steps import CLIP, LEARNING_RATE, NOISE_MULTIPLIER, OPACUS_MODES, opacus_step
from benchmarks.people_models import Case
from benchmarks.side_by_side import Call, Row, peak_bytes, times_in_turns
from discreet.cli.console import print_table
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import secure_source

SECONDS = 4.0


def logistic_regression() -> nn.Module:
    """784-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def perceptron() -> nn.Module:
    """784-128-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutions() -> nn.Module:
    """The 16-32 tanh network of Papernot et al. 2021 and Tramer and Boneh 2021."""
    first = [nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)]
    second = [nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"lr": logistic_regression, "mlp": perceptron, "cnn": convolutions}


def rows(
    models: Sequence[str] = tuple(MODELS), batches: Sequence[int] = (64, 256), *, seconds: float = SECONDS
) -> list[Row]:
    """Rows of model, batch, what, ms, ratio, ratio_of_fastest and kind; `seconds` for each function compared.

    `kind` is gradient or step (ms), memory (bytes and their ratio), or skipped (with the reason).
    """
    found: list[Row] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus, at every first layer
        for name in models:
            for count in batches:
                case = {"model": name, "batch": count}
                found += [case | row for row in _case(MODELS[name], count, seconds)]
    return found


def _case(build: Callable[[], nn.Module], count: int, seconds: float) -> list[Row]:
    inputs, targets = torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))
    gradients = _gradients(build(), inputs, targets)
    steps, skipped = _steps(build, inputs, targets)
    missing = [{"what": what, "kind": "skipped", "reason": reason} for what, reason in skipped]
    timed = _timed(gradients, seconds, kind="gradient") + _timed(steps, seconds, kind="step")
    return timed + missing + _memory(gradients)


def _gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Call]:
    """What is compared to the first: calls without side effects."""
    source, size = secure_source(), sum(value.numel() for value in model.parameters())
    return {
        "plain gradient": partial(plain_gradient, model, inputs, targets),
        "clipped sum": partial(clipped_gradient_sum, model, inputs, targets=targets, clip_norm=CLIP),
        "vmap(grad)": partial(vmapped_sum, model, inputs, targets),
        "noise": lambda: source.normal(size),
    }


def plain_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the mean loss by autograd, one tensor a parameter: what a step of SGD starts from."""
    return torch.autograd.grad(functional.cross_entropy(model(inputs), targets), tuple(model.parameters()))


def vmapped_sum(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The clipped sum the usual way: every gradient built by torch.func, then clipped, then added up."""
    values = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, values, (example.unsqueeze(0),))
        return functional.cross_entropy(outputs, target.unsqueeze(0))

    found = vmap(grad(loss), in_dims=(None, 0, 0))(values, inputs, targets)
    gradients = torch.cat([value.flatten(1) for value in found.values()], 1)
    scale: Tensor = (CLIP / gradients.norm(dim=1)).clamp(max=1.0)
    return scale @ gradients


def _steps(
    build: Callable[[], nn.Module], inputs: Tensor, targets: Tensor
) -> tuple[dict[str, Call], list[tuple[str, str]]]:
    """Whole steps on models of their own, and the peers that are not there, with the reason."""
    steps: dict[str, Call] = {
        "plain step": plain_step(build(), inputs, targets),
        "DP-SGD step": private_step(build(), inputs, targets, add_noise=secure_noise()),
        "DP-SGD step, torch's noise": private_step(build(), inputs, targets, add_noise=torch_noise),
    }
    peers = [f"Opacus {mode}" for mode in OPACUS_MODES]
    if importlib.util.find_spec("opacus") is None:
        return steps, [(peer, "opacus is not installed") for peer in peers]
    for mode, peer in zip(OPACUS_MODES, peers, strict=True):
        steps[peer] = opacus_step(mode, Case(build(), inputs, targets)).take
    return steps, []


def secure_noise() -> Callable[[Tensor], Tensor]:
    """The project's noise, from the operating system's key."""
    source, mechanism = secure_source(), Gaussian(NOISE_MULTIPLIER)
    return lambda total: mechanism.add_noise(total, CLIP, source)


def torch_noise(total: Tensor) -> Tensor:
    """Noise as Opacus draws it unless told otherwise: fast, and predictable from what came before."""
    return total + torch.randn_like(total) * (NOISE_MULTIPLIER * CLIP)


def plain_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Call:
    """One step of SGD by torch.optim."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def private_step(model: nn.Module, inputs: Tensor, targets: Tensor, *, add_noise: Callable[[Tensor], Tensor]) -> Call:
    """One step of DP-SGD: the clipped sum, noise, and the update over the batch size."""
    parameters = tuple(model.parameters())
    sizes = [value.numel() for value in parameters]

    @torch.no_grad()
    def step() -> None:
        total, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=CLIP)
        noised = add_noise(total)
        for value, change in zip(parameters, torch.split_with_sizes(noised, sizes), strict=True):
            value.sub_(change.view(value.shape), alpha=LEARNING_RATE / len(inputs))

    return step


def _timed(calls: dict[str, Call], seconds: float, *, kind: str) -> list[Row]:
    """Times of calls that take turns; ratios are to the first."""
    times = times_in_turns(calls, seconds)
    median = {what: statistics.median(spent) for what, spent in times.items()}
    fastest = {what: min(spent) for what, spent in times.items()}
    first = next(iter(calls))
    return [
        {
            "what": what,
            "kind": kind,
            "ms": median[what],
            "fastest_ms": fastest[what],
            "ratio": median[what] / median[first],
            "ratio_of_fastest": fastest[what] / fastest[first],
        }
        for what in calls
    ]


def _memory(calls: dict[str, Call]) -> list[Row]:
    """The most bytes of tensors alive at once inside each call, and their ratio to the first."""
    peaks = {what: peak_bytes(call) for what, call in calls.items()}
    first = next(iter(peaks.values()))
    return [{"what": what, "kind": "memory", "bytes": peak, "ratio": peak / first} for what, peak in peaks.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description="Per-example clipping against plain gradients, vmap and Opacus.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time for each function compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    found = rows(chosen.models, chosen.batches, seconds=chosen.seconds)
    print_table(found)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
