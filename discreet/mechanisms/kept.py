"""What the release of a round keeps for the rounds after it: a secret of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Kept(Protocol):
    """Tensors that outlive a round: of a run on disk, by `discreet.server.run_folder.RunSecrets`."""

    def load(self) -> Mapping[str, Tensor]:
        """What was saved last; empty before."""

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces it as a whole; after a crash the old or the new is there."""


@dataclass
class KeptInMemory:
    """`Kept` of rounds that no run folder holds."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def load(self) -> Mapping[str, Tensor]:
        """See `Kept`."""
        return self.tensors

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Kept`."""
        self.tensors = dict(tensors)
