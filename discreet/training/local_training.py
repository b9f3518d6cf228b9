"""A client's local work: plain SGD, DP-SGD, or one noised full-batch step. Pure: parameters in, update out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from discreet.privacy.events import poisson_round_event
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.per_example import clipped_gradient_sum
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import poisson_sample
from discreet.tasks.examples import Examples
from discreet.tasks.models import flatten_parameters, load_parameters

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class ExamplePrivacy:
    """DP-SGD inside a client: the L2 clip of each example's gradient, and the noise on their sum.

    `public_num_examples` is a declared constant that the sampling probability and the number of steps follow from,
    whatever the client has; where it is None they follow from the client's own number of examples.
    """

    l2_norm_clip: float
    noise_multiplier: float
    draws: int = 1
    public_num_examples: int | None = None


@dataclass(frozen=True)
class LocalSettings:
    """What a client does with its examples in one round. `example` None: plain SGD on shuffled batches."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    example: ExamplePrivacy | None = None


def counted_examples(num_examples: int, settings: LocalSettings) -> int:
    """The n that DP-SGD and its account go by: the declared constant, or else the client's own number of examples."""
    declared = settings.example.public_num_examples if settings.example else None
    return num_examples if declared is None else declared


def sampling_probability(num_examples: int, settings: LocalSettings) -> float:
    """The chance of an example to be in a Poisson batch: batch_size / n, at most 1; n as in `counted_examples`.

    >>> how = LocalSettings(epochs=1, batch_size=25, learning_rate=0.1, momentum=0.0)
    >>> sampling_probability(100, how), sampling_probability(3, how)
    (0.25, 1.0)
    >>> declared = LocalSettings(1, 25, 0.1, 0.0, ExamplePrivacy(1.0, 1.0, public_num_examples=50))
    >>> sampling_probability(100, declared), sampling_probability(3, declared)
    (0.5, 0.5)
    """
    counted = counted_examples(num_examples, settings)
    return min(1.0, settings.batch_size / counted) if counted else 0.0


def steps_of(num_examples: int, settings: LocalSettings) -> int:
    """How many local steps a round takes: epochs * ceil(n / batch_size); n as in `counted_examples`."""
    return settings.epochs * math.ceil(counted_examples(num_examples, settings) / settings.batch_size)


def example_event(num_examples: int, settings: LocalSettings) -> DpEvent:
    """What one local DP-SGD step costs an example of this client.

    With `public_num_examples` neighbours differ by one example that is added or removed. Without it the guarantee is
    zero-out: an example contributes nothing, and the client's n, which decides the probability and is treated as known
    to whoever sees the epsilon, stays. A real removal would change everybody's probability, and cost more than this.
    """
    if settings.example is None:
        raise ValueError("example_event needs settings.example")
    probability = sampling_probability(num_examples, settings)
    return poisson_round_event(probability, noise_multiplier=settings.example.noise_multiplier)


def local_update(
    model: nn.Module, params: Tensor, examples: Examples, *, settings: LocalSettings, source: RandomSource
) -> Tensor:
    """The change of the parameters after a client's local work, (num_params,), float32.

    Guarantee (`settings.example` given): each step is a Poisson-sampled Gaussian mechanism on the sum of clipped
    per-example gradients (Abadi et al. 2016, Algorithm 1): every example joins a batch with `sampling_probability`,
    its gradient is clipped to `l2_norm_clip`, noise of `noise_multiplier * l2_norm_clip` is drawn for the sum also if
    the batch is empty, and the sum is divided by `batch_size`, a constant. Momentum and the sum over steps are
    post-processing. Which neighbours that is for: see `example_event`.

    Args:
      model: the architecture; its parameters are overwritten.
      params: (num_params,), where the work starts.
      examples: the client's own. With none the update is zero, except for DP-SGD with `public_num_examples`: that
        takes its steps and draws its noise all the same, since one example less must not be seen.
      settings: epochs, batch size, rates.
      source: of batches and noise.
    """
    start = params.to(torch.float32)
    if steps_of(len(examples), settings) == 0:
        return torch.zeros_like(start)
    load_parameters(model, start)
    model.train()
    step = _dp_sgd if settings.example else _sgd
    return step(model, examples, settings, source) - start


def _sgd(model: nn.Module, examples: Examples, settings: LocalSettings, source: RandomSource) -> Tensor:
    # Not torch.optim: importing it costs each client process 1.5 s, for these three lines.
    parameters = list(model.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    for epoch in range(settings.epochs):
        order = source.child("epoch", epoch).permutation(len(examples))
        for batch in torch.split(order, settings.batch_size):
            loss = nn.functional.cross_entropy(model(examples.inputs[batch]), examples.targets[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                    velocity.mul_(settings.momentum).add_(gradient)
                    parameter.sub_(velocity, alpha=settings.learning_rate)
    return flatten_parameters(model)


def _dp_sgd(model: nn.Module, examples: Examples, settings: LocalSettings, source: RandomSource) -> Tensor:
    example = settings.example
    assert example is not None
    mechanism = Gaussian(example.noise_multiplier, draws=example.draws)
    probability = sampling_probability(len(examples), settings)
    params = flatten_parameters(model)
    velocity = torch.zeros_like(params)
    for number in range(steps_of(len(examples), settings)):
        draw = source.child("step", number)
        batch = poisson_sample(len(examples), probability=probability, source=draw.child("batch"))
        total, _ = clipped_gradient_sum(
            model, examples.inputs[batch], targets=examples.targets[batch], l2_norm_clip=example.l2_norm_clip
        )
        noised = mechanism.add_noise(total, example.l2_norm_clip, draw.child("noise"))
        velocity = settings.momentum * velocity + noised / settings.batch_size
        params = params - settings.learning_rate * velocity
        load_parameters(model, params)
    return params
