"""A server optimizer from outside: Nesterov's momentum, with a vector and a number of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from discreet.planning.server_optimizer import Change
from discreet.planning.state import State


@dataclass(frozen=True)
class Nesterov:
    """FedAvg with Nesterov's momentum (1983)."""

    rate: float = 1.0
    keep: float = 0.5

    def step(self, state: State, change: Change) -> State:
        before = state.vectors.get("momentum", 0 * change.mean)
        momentum = self.keep * before + change.mean
        params = state.params + self.rate * (change.mean + self.keep * momentum)
        vectors = {"momentum": momentum}
        return replace(state, round=state.round + 1, params=params, vectors=vectors)
