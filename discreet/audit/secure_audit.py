"""The audit of secure aggregation at user level: one masked sum is opened again and again, with a client and without.

Only the honest clients of the worst case take part, n - d - c of them: what more of them add, and the noise that
colluding clients know and take off, makes no sum easier to read. The canary is one of them. If it is out, its vector is
zeroed out but for its noise, as neighbours have it. Masks change no bit of a sum, so that there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from discreet.audit.auditor import noised_sum
from discreet.audit.canaries import draw_canaries
from discreet.audit.canary_scores import Claim, Experiment, Observation, RepeatedScores
from discreet.client.noised_vector import noised_vector
from discreet.config import ConfigError, RunConfig
from discreet.federated.guarantees import guarantees_of
from discreet.federated.messages import TrainReply, TrainRequest, Work
from discreet.federated.round import RoundSettings, ServerState, initial_state
from discreet.federated.run_plan import round_settings
from discreet.federated.sealed_sum import Sealed
from discreet.federated.secure_round import secure_round
from discreet.federated.session import checked
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.quantile import BIT_SENSITIVITY
from discreet.privacy.randomness import RandomSource, source_of
from discreet.privacy.secure_grid import SecureSum
from discreet.secure_settings import Sizes
from discreet.settings import client_settings
from discreet.tasks.model_check import num_params_of

NOTHING = "nothing"  # the query of a request that asks for no update, and that no client answers
LONG = 1e4  # times the clip norm: the length of what the canary encodes

# One client's vector, noise included: `discreet.client.noised_vector.noised_vector`, or a faulty one in tests.
MakeVector = Callable[[SecureSum, TrainReply, TrainRequest, RandomSource], Tensor]


@dataclass(frozen=True)
class SecureAudit:
    """What is put to the test: `releases` of a round with the canary's update and bit, and as many without them."""

    releases: int = 2000


def audit_secure(config: RunConfig, audit: SecureAudit, *, make: MakeVector = noised_vector) -> Experiment:
    """Repeats a round under secure aggregation, and scores the canary by the update and the count that it opens.

    Raises:
      ConfigError: the user level has no secure aggregation with noise, clients rate the model too, or there are fewer
        than two releases.
    """
    if not config.privacy.user.secure or config.privacy.user.noise_multiplier == 0 or config.evaluation.private:
        raise ConfigError(
            "an audit of masked sums needs privacy.user.aggregation=secure with noise, and evaluation.kind=public or "
            "none"
        )
    if audit.releases < 2:
        raise ConfigError(f"an audit needs at least two releases of a masked sum (got {audit.releases})")
    resolved, task = checked(config)
    settings = round_settings(resolved, Sizes(num_params_of(resolved.model.name, task)))
    assert settings.user is not None
    assert settings.secure is not None
    source = source_of(config.seed).child("audit")
    round_ = MaskedRound.of(resolved, settings, source)
    scores = RepeatedScores(
        *(
            np.array([round_.score(included, source.child(str(included), n), make) for n in range(audit.releases)])
            for included in (True, False)
        )
    )
    spent = PrivacyLedger().record(settings.user.event)
    claim = Claim.of(resolved.privacy, spent, guarantees_of(resolved)[0].adjacency)
    facts: dict[str, str | int | float | bool] = {
        "releases": audit.releases,
        "nodes": settings.secure.nodes,
        "honest survivors": settings.secure.summands,
        "noise_multiplier": settings.user.noise_multiplier,
        "secure": config.seed is None,
    }
    return Experiment("a masked sum", (Observation("run", claim, scores),), facts)


@dataclass(frozen=True, eq=False)
class MaskedRound:
    """A round whose clients send nothing but noise, the canary aside.

    Attributes:
      trains, rests: what clients are asked: for an update and a bit, or for nothing but noise.
      canary: what the canary replies.
      direction: of its update, (num_params,), of norm 1.
    """

    settings: RoundSettings
    vector: SecureSum
    trains: TrainRequest
    rests: TrainRequest
    start: ServerState
    canary: TrainReply
    direction: Tensor

    @classmethod
    def of(cls, config: RunConfig, settings: RoundSettings, source: RandomSource) -> MaskedRound:
        """The first round of a run."""
        vector = settings.secure
        assert vector is not None
        clip_norm, adaptive = config.privacy.user.clip.norm, vector.bit_steps > 0
        direction = draw_canaries(1, vector.num_params, source.child("direction")).direction(0)
        start = initial_state(torch.zeros_like(direction), clip_norm=clip_norm)
        canary = TrainReply(1, (LONG * clip_norm * direction).float(), below=adaptive)
        trains = TrainRequest(1, clip_norm, client_settings(config))
        rests = replace(trains, work=Work(trains=False, query=NOTHING))
        return cls(settings, vector, trains, rests, start, canary, direction)

    def score(self, included: bool, source: RandomSource, make: MakeVector) -> float:
        """Of one opened sum: the log-likelihood ratio of in and out, up to a constant and to rounding."""
        requests = [self.trains if included else self.rests, *[self.rests] * (self.vector.summands - 1)]
        vectors = [
            make(self.vector, self.canary, request, source.child(number)) for number, request in enumerate(requests)
        ]
        total = torch.stack(vectors).sum(dim=0) % 2**self.vector.bits
        sealed = Sealed(lambda: self.vector.centred(total), len(vectors))
        after, seen = secure_round(self.start, sealed, self.settings, charge=lambda _: None)
        score = float(noised_sum(self.settings, self.start, after) @ self.direction) / self._update_variance
        # A fraction that was clamped to 0 or 1 hides the count.
        if seen.fraction_below is not None and 0 < seen.fraction_below < 1:
            score += (seen.fraction_below - 0.5) * self.settings.expected_cohort / self._count_variance
        return score

    @property
    def _update_variance(self) -> float:
        """Of the noise along the canary's direction, over the canary's length."""
        return self.start.clip_norm * self.vector.noise_stddev**2

    @property
    def _count_variance(self) -> float:
        """Of the noise on the sum of (bit - 1/2), over what the canary adds to it."""
        noise = math.sqrt(self.vector.summands * self.vector.variance) / (2 * self.vector.bit_steps)
        return noise**2 / BIT_SENSITIVITY
