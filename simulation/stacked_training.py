"""The local work of a chunk of clients at once: `client_app.training.local_update`, row by row the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.training import LocalSettings, sampling_probability, steps_of
from discreet.privacy.mechanisms import Gaussian
from discreet.tasks.examples import Examples
from simulation.batches import Table, poisson_batch, read_mean, read_sum, shuffled_batches
from simulation.draws import Draws
from simulation.stacked_models import Stack


@dataclass(frozen=True, eq=False)
class Cohort:
    """Clients that are trained together: what they hold, what they are asked, what they draw.

    Attributes:
        table: their examples, those with most of them first.
        settings: of each; they differ in the noise of DP-SGD at most.
        draws: their random numbers, row by row.
    """

    table: Table
    settings: Sequence[LocalSettings]
    draws: Draws

    def __post_init__(self) -> None:
        if len(self.settings) != len(self.table.sizes):
            raise ValueError("settings must be one a client")


def stacked_updates(stack: Stack, params: Tensor, data: Examples, cohort: Cohort) -> Tensor:
    """The change of the parameters of each client, (k, num_params), float32, not clipped.

    Args:
        stack: the architecture.
        params: (num_params,), where everybody starts, on the device of `data`.
        data: the resident data set.
        cohort: at least one client. A client without examples has a zero update.
    """
    step = _dp_sgd if cohort.settings[0].example else _sgd
    with torch.no_grad():
        return step(stack, params.to(torch.float32), data, cohort)


def _sgd(stack: Stack, start: Tensor, data: Examples, cohort: Cohort) -> Tensor:
    settings, table = cohort.settings[0], cohort.table
    params = stack.layout.stack(start, len(table.sizes))
    velocities = [torch.zeros_like(values) for values in params] if settings.momentum else None
    for epoch in range(settings.epochs):
        orders = cohort.draws.permutations(table.sizes, epoch=epoch)
        for numbers in shuffled_batches(table, orders, batch_size=settings.batch_size):
            active, batch = len(numbers.counts), read_mean(data, numbers)
            current = [values[:active] for values in params]
            if velocities is None:
                stack.accumulate(current, batch, current, keep=1.0, rate=-settings.learning_rate)
                continue
            moving = [values[:active] for values in velocities]
            stack.accumulate(current, batch, moving, keep=settings.momentum, rate=1.0)
            for values, velocity in zip(current, moving, strict=True):
                values.sub_(velocity, alpha=settings.learning_rate)
    return stack.layout.change(params, start)


def _dp_sgd(stack: Stack, start: Tensor, data: Examples, cohort: Cohort) -> Tensor:
    settings, sizes = cohort.settings[0], cohort.table.sizes
    examples = [each.example for each in cohort.settings if each.example]
    mechanisms = [Gaussian(example.noise_multiplier, draws=example.draws) for example in examples]
    probabilities = [sampling_probability(size, batch_size=settings.batch_size) for size in sizes.tolist()]
    steps = [steps_of(size, settings) for size in sizes.tolist()]
    params = stack.layout.stack(start, len(sizes))
    velocities = start.new_zeros(len(sizes), stack.layout.size) if settings.momentum else None
    for step in range(max(steps)):
        active = sum(count > step for count in steps)
        members = cohort.draws.batches(sizes[:active], probabilities, step=step)
        numbers, clip = poisson_batch(cohort.table, *members, active=active), examples[0].l2_norm_clip
        current = [values[:active] for values in params]
        if numbers.counts.any():
            totals = stack.clipped_sums(current, read_sum(data, numbers), clip)
        else:
            totals = start.new_zeros(active, stack.layout.size)
        # Noise also where a client's batch is empty: its total is zero, and the noise is the same.
        change = cohort.draws.add_noise(totals, mechanisms, clip, step=step).div_(settings.batch_size)
        if velocities is not None:
            change = velocities[:active].mul_(settings.momentum).add_(change)
        for values, moved in zip(current, stack.layout.views(change), strict=True):
            values.sub_(moved, alpha=settings.learning_rate)
    return stack.layout.change(params, start)
