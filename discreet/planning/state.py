"""The state of a run as one value: everything that a round changes. A checkpoint stores it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from discreet.mechanisms.round_state import CarriedState, StateInMemory

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class State:
    """The state after `round` rounds.

    Attributes:
      params, velocity: the model's parameters, and the first moment of the server's optimizer,
        (num_params,), float32.
      clip_norm: C_t for the next round; infinity if user-level privacy is off.
      noise_energy: the expected squared norm of the noise in the velocity of SGD.
      second_moment: the second moment of Adam and Yogi, (num_params,); (0,) before their first
        step, and always for SGD.
      epsilon_example, epsilon_local, epsilon_local_pure: the largest epsilons that clients report
        from their own accounts.
      unaccounted: the clients that reported an infinite epsilon although the run has a finite one;
        they are not included in these maxima.
      vectors: what a server optimizer from outside carries, tensors by name.
      carried: the state that the run's mechanism carries from round to round; not part of a
        checkpoint.
    """

    round: int
    params: Tensor
    velocity: Tensor
    clip_norm: float
    noise_energy: float = 0.0
    # the status command does not need torch
    second_moment: Tensor = field(default_factory=lambda: import_module("torch").zeros(0))
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0
    unaccounted: Sequence[int] = ()
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    carried: CarriedState = field(default_factory=StateInMemory)

    def largest_reported(self, name: str) -> float:
        """The largest finite epsilon that clients reported; infinity if all reported infinity."""
        value: float = getattr(self, name)
        if value == 0 and self.unaccounted:
            return math.inf
        return value


def initial_state(params: Tensor, *, clip_norm: float) -> State:
    """The state before the first round."""
    params = params.detach().float()
    return State(0, params, params.new_zeros(params.shape), clip_norm)


@dataclass(frozen=True)
class Outcome:
    """The end of a run: the state after the last round, with the total spending; the reason, if it
    ended before its last planned round; and, for a run whose training failed, the state whose model
    replaces the last one."""

    checkpoint: State
    stopped: str | None
    best: State | None = None

    @property
    def model(self) -> State:
        """The state whose model the run publishes."""
        return self.best or self.checkpoint
