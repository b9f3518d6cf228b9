"""The server's optimizer: SGD with momentum, Adam or Yogi on the noised mean update of a round.
With any settings, this is post-processing of the release.

The formulas are those of Flower's FedAvgM, FedAdam and FedYogi: Hsu et al. 2019 (arXiv 1909.06335),
Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from discreet.settings.own_numbers import check_fields, kept_numbers, own_name
from discreet.settings.rules import (
    ConfigError,
    LearningRate,
    Momentum,
    Positive,
    require,
    section,
)
from discreet.settings.settings import ServerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from discreet.planning.state import State


@dataclass(frozen=True, eq=False)
class Change:
    """The change of the parameters that a round has released.

    Attributes:
      mean: the noised mean update, (num_params,), which points against the gradient.
      noise_energy: the expected squared norm of the noise in it.
    """

    mean: Tensor
    noise_energy: float = 0.0


@section("server_optimizer.")
class ServerSGD:
    """SGD with momentum, as FedAvgM; with its defaults it is FedAvg: the mean update is added to
    the parameters.

    With `shrink_with_noise` the length of a step is scaled to the estimated share of signal in it,
    see `signal_share`. ConfigError: a number is out of its range.
    """

    learning_rate: LearningRate = 1.0
    momentum: Momentum = 0.0
    shrink_with_noise: bool = False

    def step(self, state: State, change: Change) -> State:
        """The state after one step.

        >>> import torch
        >>> from discreet.planning.state import initial_state
        >>> state = initial_state(torch.zeros(2), clip_norm=1.0)
        >>> state = ServerSGD(0.5, momentum=0.9).step(state, Change(torch.tensor([1.0, -2.0])))
        >>> state.params.tolist(), state.round
        ([0.5, -1.0], 1)
        """
        velocity = self.momentum * state.velocity + change.mean
        energy = 0.0
        share = 1.0
        if self.shrink_with_noise:
            energy = self.momentum**2 * state.noise_energy + change.noise_energy
            share = signal_share(velocity, noise_energy=energy)
        params = state.params + self.learning_rate * share * velocity
        return replace(
            state, round=state.round + 1, params=params, velocity=velocity, noise_energy=energy
        )


@section("server_optimizer.")
class ServerAdam:
    """Adam, with the names and defaults of Flower's FedAdam. Its learning rate is corrected for the
    bias of the first rounds.

    `eta` is the learning rate. `beta_1` and `beta_2` are the decay rates of the two moments. `tau`
    is added to the root of the second moment: a larger value makes the steps of coordinates less
    adaptive. ConfigError: a number is out of its range."""

    eta: LearningRate = 0.1
    beta_1: Momentum = 0.9
    beta_2: Momentum = 0.99
    tau: Positive = 1e-3

    def step(self, state: State, change: Change) -> State:
        """The state after one step."""
        square = change.mean**2
        second = self.beta_2 * second_moment(state, change) + (1 - self.beta_2) * square
        # Corrected as in Kingma and Ba 2015, the line before Section 2.1; FedAdam counts its first
        # round as the second.
        number = state.round + 2
        rate = self.eta * math.sqrt(1 - self.beta_2**number) / (1 - self.beta_1**number)
        return adaptive_step(self, state, change, second=second, rate=rate)


@section("server_optimizer.")
class ServerYogi:
    """Yogi, with the names and defaults of Flower's FedYogi, and parameters and errors as in
    `ServerAdam`. Its learning rate is not corrected for the bias of the first rounds."""

    eta: LearningRate = 0.01
    beta_1: Momentum = 0.9
    beta_2: Momentum = 0.99
    tau: Positive = 1e-3

    def step(self, state: State, change: Change) -> State:
        """The state after one step."""
        before = second_moment(state, change)
        square = change.mean**2
        second = before - (1 - self.beta_2) * square * (before - square).sign()
        return adaptive_step(self, state, change, second=second, rate=self.eta)


def second_moment(state: State, change: Change) -> Tensor:
    """The second moment before a step; 0 before the first one."""
    if state.round:
        return state.second_moment
    return change.mean.new_zeros(change.mean.shape)


def adaptive_step(
    optimizer: ServerAdam | ServerYogi, state: State, change: Change, *, second: Tensor, rate: float
) -> State:
    """The step of Adam and Yogi, which divides coordinates by the roots of their second moments."""
    velocity = optimizer.beta_1 * state.velocity + (1 - optimizer.beta_1) * change.mean
    params = state.params + rate * velocity / (second.sqrt() + optimizer.tau)
    return replace(
        state, round=state.round + 1, params=params, velocity=velocity, second_moment=second
    )


class ServerOptimizer(Protocol):
    """A server optimizer: Discreet's, or one from outside, a frozen dataclass whose fields are its
    settings: numbers, texts or truth values."""

    def step(self, state: State, change: Change) -> State:
        """The state after one step: its round and parameters, and in `vectors` whatever else the
        optimizer carries, by name. Everything follows from `change`, which was noised, and from
        earlier states: so it is post-processing."""
        ...


Known = ServerSGD | ServerAdam | ServerYogi
# The defaults of optimizers in a configuration, by name. There SGD has momentum; in code it has
# momentum only if it is given.
MADE: dict[str, Known] = {
    "sgd": ServerSGD(momentum=0.8),
    "adam": ServerAdam(),
    "yogi": ServerYogi(),
}


def signal_share(velocity: Tensor, *, noise_energy: float) -> float:
    """The share of signal in a step's length, within [0, 1], given the expected energy of its
    noise.

    |velocity|^2 is on average the squared norm of the signal plus `noise_energy`: the positive part
    of sqrt(1 - noise_energy / |velocity|^2), as in James and Stein 1961. 1 without noise.
    Post-processing of a release.

    >>> import torch
    >>> signal_share(torch.tensor([3.0, 4.0]), noise_energy=16.0)
    0.6
    """
    if noise_energy == 0:
        return 1.0
    energy = float(velocity.double().square().sum())
    if energy > 0:
        return math.sqrt(max(0.0, 1 - noise_energy / energy))
    return 0.0


def server_optimizer(config: ServerConfig) -> ServerOptimizer:
    """The optimizer of a configuration; omitted numbers have the defaults that conf/config.yaml
    names.

    >>> server_optimizer(ServerConfig(optimizer="yogi", tau=0.01))
    ServerYogi(eta=0.01, beta_1=0.9, beta_2=0.99, tau=0.01)
    """
    if config.optimizer not in MADE:
        return _from_outside(config.optimizer, config.numbers or {})
    default = MADE[config.optimizer]
    if isinstance(default, ServerSGD):
        default = replace(default, shrink_with_noise=config.shrink_with_noise)
        given = {"learning_rate": config.learning_rate, "momentum": config.momentum}
    else:
        given = {
            "eta": config.learning_rate,
            "beta_1": config.beta_1,
            "beta_2": config.beta_2,
            "tau": config.tau,
        }
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(default, **known)


def _from_outside(name: str, numbers: Mapping[str, object]) -> ServerOptimizer:
    from discreet.models.models import own_builder  # with PyTorch

    try:
        made: Any = own_builder(name, setting="server.optimizer")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    is_one = isinstance(made, type) and is_dataclass(made) and hasattr(made, "step")
    require(is_one, "server.optimizer", "a dataclass with a method step(state, change)", name)
    check_fields(numbers, made, "server.numbers")
    optimizer: ServerOptimizer = made(**numbers)
    return optimizer


def server_section(optimizer: object) -> dict[str, object]:
    """The settings `server` of an optimizer, from which `server_optimizer` makes an equal one.
    ConfigError: it is none of the three, and no dataclass with a method `step`.

    >>> server_section(ServerAdam(eta=0.3))
    {'optimizer': 'adam', 'learning_rate': 0.3, 'beta_1': 0.9, 'beta_2': 0.99, 'tau': 0.001}
    """
    for kind, default in MADE.items():
        if type(optimizer) is type(default):
            values = asdict(optimizer)
            rate = values.pop("eta", None) or values.pop("learning_rate")
            return {"optimizer": kind, "learning_rate": rate, **values}
    kind_of = type(optimizer)
    rule = (
        "a ServerSGD, a ServerAdam, a ServerYogi, or a dataclass with a method step(state, change)"
    )
    is_one = is_dataclass(kind_of) and callable(getattr(optimizer, "step", None))
    require(is_one, "server_optimizer", rule, kind_of.__name__)
    numbers = {each.name: getattr(optimizer, each.name) for each in fields(cast(Any, optimizer))}
    kept = kept_numbers(numbers, "server_optimizer")
    return {"optimizer": own_name(optimizer), "numbers": kept}
