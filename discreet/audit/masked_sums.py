"""What audits of masked sums have in common: one sum is opened again and again, with the canary's part and without."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dp_accounting import DpEvent
from torch import Tensor

from discreet.audit.canary_scores import Claim, Experiment, Observation, Releases, RepeatedScores
from discreet.audit.verdict import outlook
from discreet.client.noised_vector import Values
from discreet.config import ConfigError, RunConfig
from discreet.federated.guarantees import guarantees_of
from discreet.federated.messages import TrainRequest
from discreet.federated.sealed_sum import Sealed
from discreet.privacy.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum

logger = logging.getLogger("discreet")

# One client's vector, noise included: `discreet.client.noised_vector.noised_vector`, or a faulty one in tests.
MakeVector = Callable[[SecureSum, Values, TrainRequest, RandomSource], Tensor]
# The score of one opened sum, with the canary's part in it or not.
Score = Callable[[bool, RandomSource], float]


@dataclass(frozen=True)
class Opening:
    """A masked sum that is opened again and again.

    Attributes:
      says: in words.
      vector: what clients add up.
      event: what it costs.
    """

    says: str
    vector: SecureSum
    event: DpEvent

    @property
    def noise_multiplier(self) -> float:
        """Of the noise that is accounted, over all that the canary may move."""
        assert isinstance(self.event, DistributedDiscreteGaussianDpEvent)
        return math.sqrt(self.event.summands * self.event.variance / self.event.sensitivity_squared)


def opened(vector: SecureSum, vectors: Sequence[Tensor]) -> Sealed:
    """The sum of clients' noised vectors, (length,) int64 each, as a server reads it."""
    total = torch.stack(list(vectors)).sum(dim=0) % 2**vector.bits
    return Sealed(lambda: vector.centred(total), len(vectors))


def repeated(resolved: RunConfig, opening: Opening, score: Score, *, releases: int, source: RandomSource) -> Experiment:
    """Scores `releases` sums with the canary's part and as many without, and sets them beside what one sum costs. How
    small a fault so many find is logged first.

    Raises:
      ConfigError: fewer than two releases.
    """
    if releases < 2:
        raise ConfigError(f"an audit needs at least two releases of a masked sum (got {releases})")
    vector = opening.vector
    adjacency = guarantees_of(resolved)[vector.largest_sum > 0].adjacency
    claim = Claim.of(resolved.privacy, PrivacyLedger().record(opening.event), adjacency)
    seen = Releases(1, 1.0, opening.noise_multiplier, claim.epsilon, claim.delta, repeated=True)
    logger.info("%s", outlook(seen, releases))
    scores = RepeatedScores(
        *(
            np.array([score(included, source.child(str(included), number)) for number in range(releases)])
            for included in (True, False)
        )
    )
    facts: dict[str, str | int | float | bool] = {
        "releases": releases,
        "nodes": vector.nodes,
        "honest survivors": vector.summands,
        "noise_multiplier": opening.noise_multiplier,
        "secure": resolved.seed is None,
    }
    return Experiment(opening.says, (Observation("run", claim, scores),), facts, seen)
