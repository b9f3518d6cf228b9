"""A client's local work, plain SGD, Adam or DP-SGD: parameters in, update out.

`sgd` and `dp_sgd` are written once, for one client and for the rows of a cohort (`simulation`);
they ask the clients for batches, gradients and noise. Row c of each tensor (k, ...) is client c;
clients with the most examples come first. Each counts its own steps, and gets the same numbers as
alone, up to rounding. torch.optim is not used: importing it takes 1.5 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn

from discreet.accounting.events import poisson_round_event
from discreet.layers.draws import identified
from discreet.models.models import flatten_parameters, load_parameters, masks_from, to_train
from discreet.per_example.apart import apart, undone
from discreet.per_example.objective import Loss, trainable
from discreet.per_example.own_code import memory_for
from discreet.per_example.per_example import check_finite
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.privacy.step_draws import step_batch, step_noise
from discreet.settings.training import TaskConfig, TrainingConfig
from discreet.training.failing_units import (
    COUNTS_AS_ZERO,
    NOISE_ALONE,
    RAISES,
    GradientOfUnit,
    TimeIsUp,
    clipped_total,
    say_once,
)
from discreet.training.losses import loss_of
from discreet.training.units import Drawn, Held, Units, units_of

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.per_example.memory import Memory


@dataclass(frozen=True)
class ExamplePrivacy:
    """DP-SGD inside a client: the L2 clip norm of each example's gradient, and the noise on their
    sum. Sampling probability and number of steps follow from `public_num_examples`, a declared
    constant; if None, from the client's own number.

    rows_per_owner: if set, the guarantee is for an owner with all its rows, and a step reads at
    most this many rows of an owner. All numbers of examples are then numbers of owners."""

    clip_norm: float
    noise_multiplier: float
    noise: str = "grid"
    public_num_examples: int | None = None
    rows_per_owner: int | None = None

    @property
    def mechanism(self) -> Gaussian:
        """The noise of a step."""
        return Gaussian(self.noise_multiplier, self.noise)


PLAIN = TaskConfig()
# Adam's defaults in torch.optim
BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8


READ_BY_PLAIN_SGD = {"epochs", "batch_size", "learning_rate", "momentum", "task", "failing"}
READ_BY_PLAIN_SGD |= {"example"}  # by DP-SGD, which is asked first


@dataclass(frozen=True)
class LocalSettings:
    """The settings of a client's work on its examples in one round. If `example` is None, batches
    are shuffled and there is neither clipping nor noise. Otherwise `batch_size` is the expected
    size of a batch, and the public constant by which a noised sum is divided.

    The optimizer is sgd, adam (Kingma and Ba 2015) or adamw (Loshchilov and Hutter 2019), with
    `weight_decay` as in torch.optim. The schedule is constant, or cosine or linear, by which the
    learning rate falls towards 0 over a round's local steps. `failing`: what happens to a gradient
    that can't be computed."""

    epochs: int
    batch_size: int
    learning_rate: float
    momentum: float
    example: ExamplePrivacy | None = None
    task: TaskConfig = PLAIN
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    schedule: str = "constant"
    failing: str = RAISES

    @property
    def is_plain(self) -> bool:
        """True for SGD, with or without momentum, at a constant learning rate: everything that
        `plain_sgd` does not read has its default."""
        others = [each for each in fields(self) if each.name not in READ_BY_PLAIN_SGD]
        return all(getattr(self, each.name) == each.default for each in others)

    @property
    def loss(self) -> Loss:
        """The loss, one value an example."""
        return loss_of(self.task)


def settings_without_noise(training: TrainingConfig, task: TaskConfig = PLAIN) -> LocalSettings:
    """The settings of a run, without DP-SGD's clipping and noise."""
    return LocalSettings(**asdict(training), task=task)


def counted_examples(num_examples: int, settings: LocalSettings) -> int:
    """The n of DP-SGD and its accounting: the declared constant, or else the client's own number of
    examples."""
    if settings.example:
        declared = settings.example.public_num_examples
    else:
        declared = None
    if declared is None:
        return num_examples
    return declared


def sampling_probability(num_examples: int, settings: LocalSettings) -> float:
    """The probability that an example is in a Poisson batch: batch_size / n, at most 1; n as in
    `counted_examples`.

    >>> how = LocalSettings(epochs=1, batch_size=25, learning_rate=0.1, momentum=0.0)
    >>> sampling_probability(100, how), sampling_probability(3, how)
    (0.25, 1.0)
    >>> declared = LocalSettings(1, 25, 0.1, 0.0, ExamplePrivacy(1.0, 1.0, public_num_examples=50))
    >>> sampling_probability(100, declared), sampling_probability(3, declared)
    (0.5, 0.5)
    """
    counted = counted_examples(num_examples, settings)
    if counted:
        return min(1.0, settings.batch_size / counted)
    return 0.0


def steps_of(num_examples: int, settings: LocalSettings) -> int:
    """The number of local steps in a round: epochs * ceil(n / batch_size); n as in
    `counted_examples`."""
    return settings.epochs * math.ceil(
        counted_examples(num_examples, settings) / settings.batch_size
    )


def example_event(num_examples: int, settings: LocalSettings) -> DpEvent:
    """The privacy event of one local DP-SGD step, for one example of this client.

    With `public_num_examples` neighbouring datasets differ by one example that is added or removed.
    Without it the guarantee is zero-out: an example contributes nothing, and the client's n, which
    is public, stays. A real removal would change every example's probability, and cost more than
    this.
    """
    assert settings.example is not None
    probability = sampling_probability(num_examples, settings)
    return poisson_round_event(probability, noise_multiplier=settings.example.noise_multiplier)


Batch = TypeVar("Batch")


class SgdClients(Protocol[Batch]):
    """Clients side by side: each is a row of every parameter (k, ...)."""

    def shuffled_batches(self, epoch: int) -> Iterable[tuple[int, Batch]]:
        """The batches of one epoch, each with its number of clients; these are the first ones."""

    def add_mean_gradients(
        self, params: list[Tensor], batch: Batch, into: list[Tensor], *, keep: float, rate: float
    ) -> None:
        """into = keep * into + rate * (each client's mean gradient at `params`), in place; `into`
        may be `params`."""


class DpSgdClients(Protocol[Batch]):
    """Clients side by side whose steps are clipped and noised. Sums are rows (k, num_params)."""

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> Batch:
        """A batch for each of the first clients; every example joins with its client's
        probability."""

    def clipped_sums(self, params: list[Tensor], batch: Batch, clip_norm: float) -> Tensor:
        """Each client's sum of clipped per-example gradients; zero if its batch is empty."""

    def add_noise(self, sums: Tensor, clip_norm: float, *, step: int) -> Tensor:
        """Each client's sum with noise of its own."""

    def views(self, rows: Tensor) -> list[Tensor]:
        """The rows (k, num_params) as one tensor (k, ...) for each parameter."""


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """Each client's numbers of steps taken and planned in this round, (k,), and its velocity, or
    its running means of gradients and squared gradients. All are updated in place."""

    taken: Tensor
    planned: Tensor
    moments: tuple[list[Tensor], ...]


def first_state(
    settings: LocalSettings, params: list[Tensor], planned: Sequence[int]
) -> OptimizerState:
    """The state before the first step, for parameters (k, ...) of clients that will take `planned`
    steps, (k,)."""
    if settings.optimizer == "sgd":
        count = int(settings.momentum > 0)
    else:
        count = 2
    moments = tuple([torch.zeros_like(values) for values in params] for _ in range(count))
    steps = torch.tensor(planned, dtype=torch.float64)
    return OptimizerState(torch.zeros_like(steps), steps, moments)


def take_step(
    settings: LocalSettings, state: OptimizerState, params: list[Tensor], gradients: list[Tensor]
) -> None:
    """Takes one step, in place, for the first clients: those with rows in `params` and `gradients`
    (active, ...)."""
    taken = state.taken[: len(params[0])]
    rates = _rates(settings, taken, state.planned[: len(taken)])
    taken.add_(1)
    for number, (values, gradient) in enumerate(zip(params, gradients, strict=True)):
        moments = [moment[number][: len(taken)] for moment in state.moments]
        if settings.weight_decay and settings.optimizer != "adamw":
            gradient = gradient.add(values, alpha=settings.weight_decay)
        if settings.optimizer == "sgd":
            if moments:
                move = moments[0].mul_(settings.momentum).add_(gradient)
            else:
                move = gradient
            if rates is None:
                values.sub_(move, alpha=settings.learning_rate)
            else:
                values.sub_(move * _rows(rates, values))
        else:
            if rates is None:
                steps = torch.full_like(taken, settings.learning_rate)
            else:
                steps = rates
            if settings.weight_decay and settings.optimizer == "adamw":
                values.mul_(_rows(1 - settings.weight_decay * steps, values))
            _adam_step(values, gradient, moments=moments, taken=taken, rates=steps)


def _rates(settings: LocalSettings, taken: Tensor, planned: Tensor) -> Tensor | None:
    """The learning rates (k,) after `taken` of `planned` steps; None if all are `learning_rate`."""
    if settings.schedule == "constant":
        return None
    done = taken / planned
    return settings.learning_rate * (
        1 - done if settings.schedule == "linear" else (1 + torch.cos(math.pi * done)) / 2
    )


def _adam_step(
    values: Tensor, gradient: Tensor, *, moments: list[Tensor], taken: Tensor, rates: Tensor
) -> None:
    mean, square = moments
    mean.lerp_(gradient, 1 - BETA_1)
    square.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
    size = (square / _rows(1 - BETA_2**taken, values)).sqrt_().add_(EPSILON)
    values.sub_(_rows(rates / (1 - BETA_1**taken), values) * mean / size)


def _rows(factors: Tensor, values: Tensor) -> Tensor:
    return factors.to(values).view(-1, *[1] * (values.dim() - 1))


@torch.no_grad()
def sgd(
    clients: SgdClients[Batch], params: list[Tensor], sizes: Sequence[int], settings: LocalSettings
) -> None:
    """Trains the parameters (k, ...) of clients with `sizes` examples by their optimizer, in
    place."""
    if settings.is_plain:
        plain_sgd(clients, params, settings)
        return
    state = first_state(settings, params, [steps_of(size, settings) for size in sizes])
    for epoch in range(settings.epochs):
        for active, batch in clients.shuffled_batches(epoch):
            current = [values[:active] for values in params]
            gradients = [torch.zeros_like(values) for values in current]
            clients.add_mean_gradients(current, batch, gradients, keep=1.0, rate=1.0)
            take_step(settings, state, current, gradients)


@torch.no_grad()
def plain_sgd(clients: SgdClients[Batch], params: list[Tensor], settings: LocalSettings) -> None:
    """`sgd` for settings that are plain."""
    velocities = list(map(torch.zeros_like, params))
    keep = settings.momentum
    rate = 1.0
    if not settings.momentum:
        # Each gradient is added to the parameters as it is computed, without a buffer of their
        # size.
        velocities = params
        keep = 1.0
        rate = -settings.learning_rate
    for epoch in range(settings.epochs):
        for active, batch in clients.shuffled_batches(epoch):
            current = [values[:active] for values in params]
            moving = [velocity[:active] for velocity in velocities]
            clients.add_mean_gradients(current, batch, moving, keep=keep, rate=rate)
            if settings.momentum:
                for values, velocity in zip(current, moving, strict=True):
                    values.sub_(velocity, alpha=settings.learning_rate)


@torch.no_grad()
def dp_sgd(
    clients: DpSgdClients[Batch],
    params: list[Tensor],
    sizes: Sequence[int],
    settings: LocalSettings,
) -> None:
    """Trains the parameters (k, ...) of clients with `sizes` examples by DP-SGD, in place; see
    `local_update`."""
    assert settings.example is not None
    steps = [steps_of(size, settings) for size in sizes]
    clip_norm = settings.example.clip_norm
    probabilities = [sampling_probability(size, settings) for size in sizes]
    state = first_state(settings, params, steps)
    for step in range(max(steps)):
        active = sum(count > step for count in steps)
        current = [values[:active] for values in params]
        batch = clients.poisson_batch(probabilities[:active], step=step)
        # Noise is added even if a batch is empty (Abadi et al. 2016, Algorithm 1).
        noised = clients.add_noise(
            clients.clipped_sums(current, batch, clip_norm), clip_norm, step=step
        )
        take_step(settings, state, current, clients.views(noised.div_(settings.batch_size)))


def local_update(
    model: nn.Module,
    params: Tensor,
    examples: Held,
    *,
    settings: LocalSettings,
    source: RandomSource,
) -> Tensor:
    """The change of the parameters after a client's local work, (num_params,), float32.

    Guarantee (with `settings.example`): each step is a Poisson-sampled Gaussian mechanism on the
    sum of clipped per-example gradients (Abadi et al. 2016, Algorithm 1). Every example joins a
    batch with `sampling_probability`, its gradient is clipped to `clip_norm`, noise of standard
    deviation `noise_multiplier * clip_norm` is added to the sum even if the batch is empty, and the
    sum is divided by `batch_size`, a constant. The optimizer and the sum over steps are
    post-processing. `example_event` states the adjacency.

    Training starts from `params` (num_params,), which overwrite the model's trainable parameters;
    frozen parameters have no gradient, no noise and no part in the update. `source` is for batches,
    noise and dropout masks. Without examples the update is zero, except for DP-SGD with
    `public_num_examples`: it takes its steps and draws its noise all the same, so that removing the
    last example does not show. With `settings.failing` NOISE_ALONE no example is read. With
    COUNTS_AS_ZERO work whose time is up gives the parameters that it has reached, by steps that are
    noised and paid for.
    """
    start = params.to(torch.float32)
    if settings.failing == NOISE_ALONE and settings.example is None:
        return torch.zeros_like(start)
    # What a forward leaves must not reach the next client of this process. DP-SGD undoes it at each
    # step, and a model that is not copied is tried but once.
    with undone(model, settings.loss) if settings.example else apart(model) as own:
        client = OneClient(own, examples, settings, source)
        if steps_of(len(client.units), settings) == 0:
            return torch.zeros_like(start)
        load_parameters(own, start)
        to_train(own)
        # Views of the model's own parameters: the loops update them, and so the model, in place.
        rows = [parameter.detach().unsqueeze(0) for parameter in trainable(own)]
        interrupted = settings.failing == COUNTS_AS_ZERO
        with suppress(*[TimeIsUp] * interrupted), masks_from(source, own):
            if settings.example:
                dp_sgd(client, rows, [len(client.units)], settings)
            else:
                sgd(client, rows, [len(examples)], settings)
        return flatten_parameters(own) - start


@dataclass(frozen=True, eq=False)
class OneClient:
    """A single client for `sgd` and `dp_sgd`, with gradients of any model. Its parameters are views
    of the model's."""

    model: nn.Module
    examples: Held
    settings: LocalSettings
    source: RandomSource

    @cached_property
    def units(self) -> Units:
        """The units of DP-SGD."""
        example = self.settings.example
        return units_of(self.examples, example.rows_per_owner if example else None)

    @cached_property
    def memory(self) -> Memory | None:
        """What model and loss can write to."""
        return memory_for(self.model.modules(), self.settings.loss)

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        order = epoch_order(self.source, epoch, len(self.examples))
        return ((1, batch) for batch in torch.split(order, self.settings.batch_size))

    def add_mean_gradients(
        self, params: list[Tensor], batch: Tensor, into: list[Tensor], *, keep: float, rate: float
    ) -> None:
        some = self.examples.subset(batch)
        with torch.enable_grad():
            loss = self.settings.loss(self.model(some.inputs), some.targets).mean()
            # A parameter that no example of the batch uses has a gradient of zero.
            gradients = torch.autograd.grad(
                loss, trainable(self.model), allow_unused=True, materialize_grads=True
            )
        for values, gradient in zip(into, gradients, strict=True):
            values.mul_(keep).add_(gradient, alpha=rate)

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> Drawn:
        drawn = step_batch(self.source, step, len(self.units), probability=probabilities[0])
        return self.units.drawn(drawn, self.source.child("step", step).child("rows"))

    def clipped_sums(self, params: list[Tensor], batch: Drawn, clip_norm: float) -> Tensor:
        loss = self.settings.loss
        units = self.units

        def together() -> Tensor:
            with identified(batch.rows):  # an absent example leaves the masks of the others
                total, norms = units.clipped_sum(self.model, batch, clip_norm=clip_norm, loss=loss)
            try:
                check_finite(len(norms), int(norms.isfinite().sum()))
            except ValueError as error:
                if self.settings.failing == RAISES:
                    raise
                say_once("a step is noise alone", error)
            return total

        each = GradientOfUnit(self.model, loss, clip_norm, memory=self.memory)
        total = clipped_total(together, each, units.each(batch), failing=self.settings.failing)
        return total.unsqueeze(0)

    def add_noise(self, sums: Tensor, clip_norm: float, *, step: int) -> Tensor:
        assert self.settings.example is not None
        return self.settings.example.mechanism.add_noise(
            sums, clip_norm, step_noise(self.source, step)
        )

    def views(self, rows: Tensor) -> list[Tensor]:
        shapes = [parameter.shape for parameter in trainable(self.model)]
        parts = torch.split(rows, [shape.numel() for shape in shapes], dim=1)
        return [part.view(1, *shape) for part, shape in zip(parts, shapes, strict=True)]


def epoch_order(source: RandomSource, epoch: int, size: int) -> Tensor:
    """The order of a client's examples in an epoch."""
    return source.child("epoch", epoch).permutation(size)
