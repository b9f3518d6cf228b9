"""Queries: what each client of a cohort answers with one vector. `discreet.federated.estimates` reads the noised sum.

A client's answer is a vector (length,) of L2 norm at most 1, whatever its data are, so that adding or removing one
client moves the sum by at most 1. The server clips each answer to that norm once more, adds them up, adds Gaussian
noise, and divides by public constants alone. A client that is missing, or whose answer is malformed, adds zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from discreet.client_settings import ClientSettings, ConfigError
from discreet.tasks.targets import CLASSES, LABELS, Target

EVALUATION = "evaluation"  # of a model, on what clients hold out
ACCURACY_SCALE = 2.0  # an accuracy less one half lies in [-1/2, 1/2]: times this, in [-1, 1]


class Query(Protocol):
    """What is asked of a model, and how a client answers."""

    @property
    def length(self) -> int:
        """How many numbers an answer has."""

    def answer(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A client's answer, (length,), float64, of L2 norm at most 1; zeros without examples.

        Args:
          outputs: (n, k), what the model gives for the examples that the client holds out.
          targets: as `Examples` holds them.
        """


@dataclass(frozen=True)
class Accuracy:
    """The share of held-out examples, or labels, that a model gets right; `kind` is that of the targets.

    A client answers (share - 1/2) * 2, and one without held-out examples 0, as if half of them were right.
    """

    kind: str

    @property
    def length(self) -> int:
        """See `Query`."""
        return 1

    def answer(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Query`."""
        if len(targets) == 0:
            return torch.zeros(1, dtype=torch.float64)
        # argmax takes a NaN for the largest value, which would count as right by luck.
        right = outputs.argmax(dim=1) == targets if self.kind == CLASSES else (outputs >= 0) == (targets == 1)
        known = ~outputs.isnan().any(dim=1) if self.kind == CLASSES else ~outputs.isnan()
        share = int((right & known).sum()) / right.numel()
        return torch.tensor([(share - 0.5) * ACCURACY_SCALE], dtype=torch.float64)


def query_of(name: str, run: ClientSettings, target: Target) -> Query:
    """The query of that name in a run on data with this target.

    Raises:
      ConfigError: there is no such query, or it is about targets of another kind.
    """
    if name != EVALUATION:
        raise ConfigError(f"a query must be {EVALUATION} (got {name})")
    if target.kind not in (CLASSES, LABELS):
        raise ConfigError(f"evaluation.metrics={','.join(run.evaluation.metrics)} needs classes or labels")
    return Accuracy(target.kind)
