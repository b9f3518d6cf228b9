"""The audit of local privacy: the same release again and again, with one unit and with its opposite in its place.

Neighbours replace a unit, and everybody sees what a client sends: there is neither sampling nor a sum to hide in, so
one canary in many independent releases is the strongest test. It is as far from its opposite as the clip allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from discreet.audit.canary_scores import Claim, Experiment, Observation, Releases, RepeatedScores
from discreet.client.local_privacy import LocalPrivacy, release_step, release_update, round_privacy
from discreet.client_settings import ConfigError
from discreet.config import RunConfig
from discreet.privacy.mechanisms import Gaussian, Laplace, laplace_step_sensitivity
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.randomness import RandomSource, source_of
from discreet.settings import client_settings
from discreet.tasks.examples import Examples
from discreet.training.local_training import LocalSettings, settings_without_noise

COORDINATES = 8  # of what is released: more show no more, and cost time
EXAMPLES = 4  # of a client that takes one full-batch step
LONG = 1e4  # far beyond any clip


@dataclass(frozen=True)
class LocalAudit:
    """What is put to the test: `releases` with the canary, and as many with its opposite, of each round."""

    releases: int = 10_000
    rounds: int = 1


def audit_local(config: RunConfig, audit: LocalAudit) -> Experiment:
    """Repeats the local mechanism of the first rounds of `config` on a canary, and on its opposite.

    `gaussian`, `laplace`: the update is one long vector along one coordinate, or its negative. `laplace_step`: of a
    linear model's examples one has a long input, or its negative; the others are known.

    Raises:
      ConfigError: there is no local privacy, or fewer rounds.
    """
    run = client_settings(config)
    if run.local.kind == "none":
        raise ConfigError("privacy.local.kind must not be none: without noise there is no claim to audit")
    if not 1 <= audit.rounds <= config.rounds or audit.releases < 2:
        raise ConfigError(f"an audit needs 1 .. {config.rounds} rounds and two releases (got {audit})")
    source = source_of(config.seed).child("audit")
    training = settings_without_noise(run.training)
    canary = LongInput(training) if run.local.kind == "laplace_step" else LongUpdate()
    spent, seen, noises = PrivacyLedger(), [], list[float]()
    for number in range(1, audit.rounds + 1):
        privacy = round_privacy(run, round_number=number)
        assert privacy is not None
        scores = repeated(canary, privacy, audit.releases, source.child("round", number))
        spent = spent.record(privacy.event)
        noises.append(privacy.noise_multiplier)
        seen.append((f"round {number}", PrivacyLedger().record(privacy.event), scores))
    seen.append(("run", spent, _added_up([scores for *_, scores in seen])))
    found = [Observation(name, Claim.of(config.privacy, ledger, "replace"), scores) for name, ledger, scores in seen]
    facts: dict[str, str | int | float | bool] = {
        "kind": run.local.kind,
        "releases": audit.releases,
        "rounds": audit.rounds,
        "noise": config.privacy.noise,
        "secure": config.seed is None,
    }
    claim, gaussian = found[-1].claim, run.local.kind == "gaussian"
    noise = math.hypot(*(1 / each for each in noises)) ** -1  # of the Gaussian that all together are
    releases = Releases(1, 1.0, noise, claim.epsilon, claim.delta, repeated=True, gaussian=gaussian)
    return Experiment("local level", tuple(found), facts, releases)


def _added_up(rounds: Sequence[RepeatedScores]) -> RepeatedScores:
    seen, unseen = np.stack([each.seen for each in rounds]), np.stack([each.unseen for each in rounds])
    return RepeatedScores(seen.sum(axis=0), unseen.sum(axis=0))


def repeated(canary: Canary, privacy: LocalPrivacy, count: int, source: RandomSource) -> RepeatedScores:
    """Log-likelihood ratios of `count` releases with the canary, and of as many with its opposite.

    The auditor knows what either would release without noise, and the noise that is claimed.
    """
    still = replace(privacy, noise_multiplier=0.0)
    ours, theirs = (canary.release(still, included, source).double() for included in (True, False))
    ratio = partial(_ratio, ours, theirs, privacy.mechanism, sensitivity=canary.sensitivity(privacy))
    scores = (
        np.array([ratio(canary.release(privacy, included, source).double()) for _ in range(count)])
        for included in (True, False)
    )
    return RepeatedScores(*scores)


def _ratio(
    ours: Tensor, theirs: Tensor, mechanism: Gaussian | Laplace, released: Tensor, *, sensitivity: float
) -> float:
    """log p(released | ours) - log p(released | theirs)."""
    if isinstance(mechanism, Gaussian):
        middle = (ours + theirs) / 2
        return float((released - middle) @ (ours - theirs)) / mechanism.stddev(sensitivity) ** 2
    return float((released - theirs).abs().sum() - (released - ours).abs().sum()) / mechanism.scale(sensitivity)


@dataclass(frozen=True)
class LongUpdate:
    """An update (`COORDINATES`,) that is long along its first coordinate; its negative in its place."""

    def release(self, privacy: LocalPrivacy, included: bool, source: RandomSource) -> Tensor:
        update = torch.zeros(COORDINATES)
        update[0] = LONG if included else -LONG
        return release_update(update, privacy, source=source)

    def sensitivity(self, privacy: LocalPrivacy) -> float:
        return 2 * privacy.norm_clip


@dataclass(frozen=True)
class LongInput:
    """An example with a long input in a full-batch step of a linear model of two classes; its negative in its place.

    The model's weights are zero, so that the two gradients are opposite. The other examples have inputs of zero.
    """

    training: LocalSettings

    def release(self, privacy: LocalPrivacy, included: bool, source: RandomSource) -> Tensor:
        model = nn.Linear(COORDINATES // 2, 2)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        inputs = torch.zeros(EXAMPLES, COORDINATES // 2)
        inputs[0, 0] = LONG if included else -LONG
        examples = Examples(inputs, torch.zeros(EXAMPLES, dtype=torch.int64))
        return release_step(model, examples, training=self.training, privacy=privacy, source=source)

    def sensitivity(self, privacy: LocalPrivacy) -> float:
        return laplace_step_sensitivity(
            self.training.learning_rate, l1_norm_clip=privacy.norm_clip, num_examples=EXAMPLES
        )


Canary = LongUpdate | LongInput
