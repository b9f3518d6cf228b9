"""Audits that repeat one release, with the canary and with what stands in its place: one harness for all of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.audit.canary_scores import Claim, Experiment, Facts, Observation, Releases, Scores
from discreet.audit.verdict import outlook
from discreet.privacy.randomness import RandomSource, source_of
from discreet.server.plan import Plan
from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet")

# The score of one release, a function of what was released: 1 with the canary, 0 without, -1 with its opposite.
Score = Callable[[int, RandomSource], float]


@dataclass(frozen=True)
class Release:
    """A release that is made again and again.

    Attributes:
      mechanism: in words.
      event: its cost.
      adjacency: of the guarantee that pays, in words.
      score: makes it, and scores it.
      facts: its settings, for audit.json.
      probability: with which the canary is in a cohort.
    """

    mechanism: str
    event: DpEvent
    adjacency: str
    score: Score
    facts: Facts
    probability: float = 1.0


def repeated(plan: Plan, release: Release, count: int) -> Experiment:
    """Scores `count` releases with the canary and as many without. How small a fault so many find is logged first.

    Raises:
      ConfigError: fewer than two releases.
    """
    claim = Claim.of(plan, PrivacyLedger().record(release.event), release.adjacency)
    releases = Releases(1, release.probability, noise_multiplier_of(release.event), claim, repeated=True)
    logger.info("%s", outlook(releases, count))
    scores = scores_of(release.score, count, source_of(plan.seed).child("audit"))
    facts = {**release.facts, "releases": count, "secure": plan.seed is None}
    return Experiment(release.mechanism, (Observation("run", claim, scores),), facts, releases)


def noise_multiplier_of(event: DpEvent) -> float | None:
    """None of an event that is not one Gaussian, as of a sampled cohort."""
    if isinstance(event, DistributedDiscreteGaussianDpEvent):
        return math.sqrt(event.summands * event.variance / event.sensitivity_squared)
    return event.noise_multiplier if isinstance(event, GaussianDpEvent) else None


def scores_of(score: Score, count: int, source: RandomSource) -> Scores:
    """The scores of `count` releases with the canary, then of as many without.

    Raises:
      ConfigError: fewer than two releases.
    """
    if count < 2:
        raise ConfigError(f"an audit needs at least two releases of either kind (got {count})")
    included = np.arange(2 * count) < count
    drawn = [score(bool(is_in), source.child(str(is_in), n % count)) for n, is_in in enumerate(included)]
    return Scores(np.array(drawn), included)
