"""The state that a round starts from, as mechanisms see it, and the release of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CarriedState(Protocol):
    """The state that a release carries to later rounds; a secret of the run. A run with a folder
    keeps it on disk, see `discreet.run_files.run_folder.RunSecrets`."""

    def load(self) -> Mapping[str, Tensor]:
        """The tensors that were saved last; empty before the first save."""

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the state as a whole. After a crash either the old or the new state is there."""


@dataclass(eq=False)
class StateInMemory:
    """A `CarriedState` that ends with its process."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def load(self) -> Mapping[str, Tensor]:
        return self.tensors

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)


class RoundState(Protocol):
    """The part of the state before a round that mechanisms use.

    Attributes:
      round: the number of rounds completed.
      params: the model's parameters, (num_params,).
      clip_norm: C_t; infinity if nothing is clipped at the server.
      carried: the state that the mechanism carries from round to round.
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
    """A plain `RoundState`."""

    round: int
    params: Tensor
    clip_norm: float
    carried: CarriedState = field(default_factory=StateInMemory)


@dataclass(frozen=True, eq=False)
class Released:
    """The release of a round. Everything after it is post-processing.

    Attributes:
      total: the noised sum of the updates, (num_params,).
      clip_norm: the clip norm of the next round.
      fraction_below: the noised fraction of update norms at or below the clip norm; None without an
        adaptive one.
      replies: the number of updates in the sum. The guarantee does not hide who takes part.
      answers: the noised sum of the answers to a query (`queries.query.Sums`); None in a round
        without one.
    """

    total: Tensor
    clip_norm: float
    fraction_below: float | None
    replies: int
    answers: Any = None
