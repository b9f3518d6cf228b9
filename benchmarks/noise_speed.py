"""What noise costs: each way of drawing it against torch.randn, and a whole noised sum of one million parameters.

    python -m benchmarks.noise_speed

Times are the best of a few repetitions, with as many threads as PyTorch takes by itself. The ratio is to torch.randn
for as many float32 values; the last column is in millions of values a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from discreet.privacy.clipping import clip_to_grid
from discreet.privacy.discrete_gaussian import discrete_gaussian
from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import secure_source
from discreet.privacy.secure_grid import SecureCohort, secure_sum

VALUES = 10_000_000
PARAMS = 1_000_000
REPETITIONS = 5

_Case = tuple[str, int, Callable[[], object]]


def rows(values: int = VALUES, params: int = PARAMS) -> list[dict[str, Any]]:
    """One row for each case: what, how many values, milliseconds, and the ratio to torch.randn."""
    randn = {count: _milliseconds(partial(torch.randn, count)) for count in (values, params)}
    first = [{"what": "torch.randn", "values": count, "ms": ms, "ratio": 1.0} for count, ms in randn.items()]
    measured = [(what, count, _milliseconds(draw)) for what, count, draw in _draws(values) + _noised_sums(params)]
    return first + [
        {"what": what, "values": count, "ms": ms, "ratio": ms / randn[count]} for what, count, ms in measured
    ]


def _draws(count: int) -> list[_Case]:
    source, grid = secure_source(), grid_for(1.0, count)
    return [
        ("words of the cipher", count, lambda: source.words(count)),
        ("normal", count, lambda: source.normal(count)),
        ("normal, secure mode of 4 draws", count, lambda: source.normal(count, draws=4)),
        ("normal on the grid, int64", count, lambda: grid.gaussian(count, 1.0, source)),
        ("discrete Gaussian, exact, variance 4", count, lambda: discrete_gaussian(count, 4, source)),
        ("discrete Gaussian, exact, variance 2^36", count, lambda: discrete_gaussian(count, 2**36, source)),
        ("laplace, float64", count, lambda: source.laplace(count)),
        ("permutation", count, lambda: source.permutation(count)),
    ]


def _noised_sums(params: int) -> list[_Case]:
    """What a round does for each client and once for each sum, in float32 and on the grid."""
    source, grid, mechanism = secure_source(), grid_for(1.0, params), Gaussian(1.0)
    update = source.normal(params)
    update /= update.norm()
    total, steps = torch.zeros(params), torch.zeros(params, dtype=torch.int64)
    masked = secure_sum(params, SecureCohort(10, 7), noise_multiplier=1.0)
    return [
        ("a client: add to a float32 sum", params, lambda: total.add_(update)),
        ("a client: hold to the clip, truncate, add", params, lambda: steps.add_(clip_to_grid(update, 1.0, grid=grid))),
        ("a client: encode for a masked sum", params, lambda: masked.encode(update, 1.0)),
        ("a client: its noise in a masked sum", params, lambda: masked.noise(source)),
        ("a sum: float32 noise", params, lambda: mechanism.add_noise(update, 1.0, source)),
        (
            "a sum: noise on the grid, to float32",
            params,
            lambda: grid.to_float(mechanism.add_grid_noise(steps, 1.0, grid=grid, source=source)),
        ),
    ]


def _milliseconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def main() -> None:
    """Measures and prints the table."""
    table = Table(
        "what", "values", "ms", "times torch.randn", "10^6 a second", title=f"noise, {torch.get_num_threads()} threads"
    )
    for row in rows():
        rate = f"{row['values'] / row['ms'] / 1000:.2f}"
        table.add_row(row["what"], f"{row['values']:,}", f"{row['ms']:.2f}", f"{row['ratio']:.2f}", rate)
    Console().print(table)


if __name__ == "__main__":
    main()
