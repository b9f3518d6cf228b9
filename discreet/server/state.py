"""The state of a run: all that a round changes, as one value. A checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from discreet.mechanisms.round_state import CarriedState

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class State:
    """The state after `round` rounds.

    Attributes:
      params, velocity: of the model, and the first moment of the server's optimizer, (num_params,),
        float32.
      clip_norm: C_t for the next round; infinity if user-level privacy is off.
      noise_energy: the expected squared norm of the noise in the velocity of SGD.
      second_moment: of Adam and Yogi, (num_params,); (0,) before their first step, and always for
        SGD.
      epsilon_example, epsilon_local, epsilon_local_pure: the largest that clients report of their
        own accounts.
      unaccounted: clients that reported an infinite epsilon in a run that costs a finite one, and
        are not in these.
      carried: what the run's mechanism carries from round to round; no part of a checkpoint.
    """

    round: int
    params: Tensor
    velocity: Tensor
    clip_norm: float
    noise_energy: float = 0.0
    # status needs no torch
    second_moment: Tensor = field(default_factory=lambda: import_module("torch").zeros(0))
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0
    unaccounted: Sequence[int] = ()
    carried: CarriedState = field(default_factory=CarriedState)

    def largest_reported(self, name: str) -> float:
        """The largest epsilon over the clients that reported a finite one; infinity if only others
        have reported."""
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
    """The end of a run: its state after the last round, with all that was spent; why it ended other
    than by its last planned round, in words; and the state whose model is in place of the last one,
    of a run that was lost."""

    checkpoint: State
    stopped: str | None
    best: State | None = None

    @property
    def model(self) -> State:
        """The state whose model the run publishes."""
        return self.best or self.checkpoint
