"""The local work of a chunk of clients at once: `local_training.local_update`, row by row the same."""

from __future__ import annotations

import torch
from torch import Tensor

from discreet.privacy.mechanisms import Gaussian
from discreet.training.local_training import sampling_probability, steps_of
from simulation.batches import poisson_batch, read_mean, read_sum, shuffled_batches
from simulation.chunk import Chunk, descent_of
from simulation.resident import Resident
from simulation.span import span_sgd, spans
from simulation.stacked_models import Stack


def stacked_updates(stack: Stack, params: Tensor, data: Resident, chunk: Chunk) -> Tensor:
    """The change of the parameters of each client, (k, num_params), float32, not clipped.

    Args:
        stack: the architecture.
        params: (num_params,), where everybody starts, on the device of `data`.
        data: the resident data set.
        chunk: at least one client; one without examples is treated as in `local_update`.
    """
    step = _dp_sgd if chunk.settings[0].example else _sgd
    with torch.no_grad():
        return step(stack, params.to(torch.float32), data, chunk)


def _sgd(stack: Stack, start: Tensor, data: Resident, chunk: Chunk) -> Tensor:
    settings, table = chunk.settings[0], chunk.table
    if spans(stack, table.numbers.shape[1], settings):
        return span_sgd(stack, start, data, chunk)
    descent = descent_of(stack.layout.stack(start, len(table.sizes)), settings)
    for epoch in range(settings.epochs):
        orders = chunk.draws.permutations(table.sizes, epoch=epoch)
        for numbers in shuffled_batches(table, orders, batch_size=settings.batch_size):
            active = len(numbers.counts)
            into, keep, rate = descent.into(active)
            stack.accumulate(descent.current(active), read_mean(data, numbers), into, keep=keep, rate=rate)
            descent.settle(active)
    return stack.layout.change(descent.params, start)


def _dp_sgd(stack: Stack, start: Tensor, data: Resident, chunk: Chunk) -> Tensor:
    settings, sizes = chunk.settings[0], chunk.table.sizes
    examples = [each.example for each in chunk.settings if each.example]
    mechanisms = [Gaussian(example.noise_multiplier, draws=example.draws) for example in examples]
    probabilities = [sampling_probability(size, settings) for size in sizes.tolist()]
    steps = [steps_of(size, settings) for size in sizes.tolist()]
    params = stack.layout.stack(start, len(sizes))
    velocities = start.new_zeros(len(sizes), stack.layout.size) if settings.momentum else None
    for step in range(max(steps)):
        active = sum(count > step for count in steps)
        members = chunk.draws.batches(sizes[:active], probabilities, step=step)
        numbers, clip = poisson_batch(chunk.table, *members, active=active), examples[0].l2_norm_clip
        current = [values[:active] for values in params]
        if numbers.counts.any():
            totals = stack.clipped_sums(current, read_sum(data, numbers), clip)
        else:
            totals = start.new_zeros(active, stack.layout.size)
        # Noise also where a client's batch is empty: its total is zero, and the noise is the same.
        change = chunk.draws.add_noise(totals, mechanisms, clip, step=step).div_(settings.batch_size)
        if velocities is not None:
            change = velocities[:active].mul_(settings.momentum).add_(change)
        for values, moved in zip(current, stack.layout.views(change), strict=True):
            values.sub_(moved, alpha=settings.learning_rate)
    return stack.layout.change(params, start)
