"""The state that a round starts from, as mechanisms know it, and what a round releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CarriedState:
    """What a release carries to later rounds, in memory: a secret of the run. That of a run with a
    folder is on its disk, as `discreet.server.run_folder.RunSecrets` has it."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = tensors or {}

    def load(self) -> Mapping[str, Tensor]:
        """The tensors that were saved last; empty before."""
        return self.tensors

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces it as a whole; after a crash the old or the new is there."""
        self.tensors = dict(tensors)


class RoundState(Protocol):
    """The state that a round starts from, as far as mechanisms know it.

    Attributes:
      round: the number of the rounds before it.
      params: of the model, (num_params,).
      clip_norm: C_t; infinity if nothing is clipped at the server.
      carried: what the mechanism carries from round to round.
    """

    @property
    def round(self) -> int: ...

    @property
    def params(self) -> Tensor: ...

    @property
    def clip_norm(self) -> float: ...

    @property
    def carried(self) -> CarriedState: ...


@dataclass(frozen=True, eq=False)
class RoundStart:
    """A `RoundState` that is nothing else."""

    round: int
    params: Tensor
    clip_norm: float
    carried: CarriedState = field(default_factory=CarriedState)


@dataclass(frozen=True, eq=False)
class Released:
    """The release of a round, of which all that follows is post-processing.

    Attributes:
      total: the noised sum of the updates, (num_params,).
      clip_norm: of the next round.
      fraction_below: the noised fraction of update norms at or below the clip norm; None without an
        adaptive one.
      replies: how many updates were added up. Who takes part is not covered by the guarantee.
      answers: the noised sum of the answers to a query (`queries.query.Sums`); None in a round
        without one.
    """

    total: Tensor
    clip_norm: float
    fraction_below: float | None
    replies: int
    answers: Any = None
