"""Audits that repeat one release: a round, a rating of a model, or statistics, with the canary and with what stands in
its place.

The canary's update and answer are far longer than may be; the real cohort sampling, clipping and noise decide what is
seen of it. No other client takes part: the auditor knows what all others send, and would take it off. Under secure
aggregation only the honest clients of the worst case take part, n - d - c of them: what more of them add, and the noise
that colluding clients know and take off, makes no sum easier to read. Masks change no bit of a sum: there are none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.audit.canaries import Auditor, Canary, draw_canaries
from discreet.audit.canary_scores import Claim, Experiment, Facts, Observation, Releases, Scores
from discreet.audit.user_audit import check_noised
from discreet.audit.verdict import outlook
from discreet.data.examples import Task
from discreet.mechanisms.masked_gaussian import MaskedSum
from discreet.mechanisms.sums import UnopenedSum
from discreet.node.release import Values, noised_vector
from discreet.privacy.randomness import RandomSource, source_of
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainReply, TrainRequest, Work
from discreet.queries.query import EVALUATION, STATISTICS, query_of
from discreet.server.plan import Plan
from discreet.server.round import CohortSampling, RoundSettings, dp_fedavg_round
from discreet.server.run_plan import cohort_sampling, evaluation_plan, round_settings, statistics_noise
from discreet.server.state import State, initial_state
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet")

LONG = 1e4  # times the norm that clips
FIRST = 0  # the canary's number among the population's
NOTHING = "nothing"  # the query of a request that asks for no update, and that no client answers
# By what a cohort does, trains and rates: the release of a server that reads replies, and of one that opens a sum.
NAMES = {
    (True, False): ("one round of the mechanism", "a masked sum"),
    (True, True): ("a round that also rates the model", "a masked sum that also rates the model"),
    (False, True): ("private evaluation", "a masked sum of ratings"),
}

# The score of one release, a function of what was released: 1 with the canary, 0 without, -1 with its opposite.
Score = Callable[[int, RandomSource], float]
# One client's vector, noise included: `discreet.node.release.noised_vector`, or a faulty one in tests.
MakeVector = Callable[[SecureSum, Values, TrainRequest, RandomSource], Tensor]
# The replies of a cohort: 1 with the canary's, 0 without, -1 with its opposite.
Replies = Callable[[int, RandomSource], Sequence[TrainReply | UnopenedSum]]


@dataclass(frozen=True, eq=False)
class Release:
    """A release that is made again and again.

    Attributes:
      name: in words.
      guarantee: which of the three it is charged to.
      event: its cost.
      settings, start: of the round, and the state before it.
      replies: of its cohort.
      canary: what it adds to the sum of updates.
      known: what others add to it, as the auditor knows.
      trains: false if only answers are released.
    """

    name: str
    guarantee: str
    event: DpEvent
    settings: RoundSettings
    start: State
    replies: Replies
    canary: Canary
    known: Tensor | float = 0.0
    trains: bool = True

    def score(self, sent: int, source: RandomSource) -> float:
        """The log-likelihood ratio of in and out, up to constants, of one release."""
        replies, settings = self.replies(sent, source), self.settings
        if not self.trains:
            at = settings.of_round(self.start, source, lambda _: None)
            return float(settings.release.rate(replies, at, self.event).values[0])
        after, seen = dp_fedavg_round(self.start, replies, settings, source=source, charge=lambda _: None)
        (found,) = Auditor(settings, self.canary).scores(self.start, after, seen.fraction_below, known=self.known)
        return float(found if seen.answers is None else found + seen.answers.values[0] / seen.answers.stddev**2)


def audit_round(plan: Plan, *, releases: int, of_answers: bool = False, make: MakeVector = noised_vector) -> Experiment:
    """Repeats the first round of a run, and scores the canary by all that it releases: the update, the count, and with
    `evaluation.cohort=same` the answers; they are one release, which is charged as a whole.

    Args:
      of_answers: audits what rates the model, by itself if a cohort of its own is asked for that.

    Raises:
      ConfigError: there is no noise at user level, the answers of clients that answer nothing are to be audited, or
        there are fewer than two releases.
    """
    rated, own = evaluation_plan(plan), plan.run.evaluation.cohort == "own"
    if of_answers and rated is None:
        raise ConfigError("evaluation.kind must be private: otherwise clients answer nothing that could be audited")
    if of_answers and plan.mechanism is None:
        raise ConfigError("the answers that clients noise themselves are not audited: only those noised at the server")
    check_noised(plan)
    rates, trains = rated is not None and (of_answers or not own), not (of_answers and own)
    settings = rated.joined if rated and rates else round_settings(plan)
    event = settings.release.event if trains or rated is None else rated.event
    assert event is not None
    start = initial_state(torch.zeros(plan.num_params), clip_norm=plan.first_clip_norm)
    drawn = draw_canaries(1, plan.num_params, source_of(plan.seed).child("audit").child("direction"))
    values = _far(LONG * start.clip_norm * drawn.direction(0), settings, below=bool(drawn.bits[0]))
    replies, added = _replies(values), drawn.direction(0)
    if isinstance(settings.release, MaskedSum):
        request = TrainRequest(1, start.clip_norm, plan.run, work=Work(trains, EVALUATION if rates else ""))
        silent = replace(request, work=Work(trains=False, query=NOTHING)), Values(values.update)
        replies = vectors(settings.release.vector, make, (request, values), silent, silent)
    elif trains:
        total = settings.release.empty(plan.num_params, start.clip_norm)
        total.take(TrainReply(1, values.update, values.below))
        added = total.part().in_floats / settings.release.norm(start.clip_norm)
    name = NAMES[trains, rates][settings.release.masked]
    release = Release(name, USER, event, settings, start, replies, Canary(added, values.below), trains=trains)
    facts: Facts = {"metrics": ", ".join(plan.run.evaluation.metrics)} if rates else {}
    return repeated(plan, release, cohort_sampling(plan), releases, facts)


def audit_statistics(plan: Plan, task: Task, *, releases: int) -> Experiment:
    """Repeats the release of statistics of clients' data, as `discreet statistics` and `data.normalise=private` ask for
    them: everybody answers.

    Raises:
      ConfigError: they are not paid for at user level, or there are fewer than two releases.
    """
    plan.run.check_server_noise("an audit of statistics")
    query = query_of(STATISTICS, plan.run, task.shape)
    settings = round_settings(plan, answers=statistics_noise(plan, query.length))
    nothing, everybody = torch.zeros(0), CohortSampling("everyone", 1.0, plan.run.user.population_size)
    start, replies = initial_state(nothing, clip_norm=1.0), _replies(_far(nothing, settings))
    event, canary = plan.run.statistics.event, Canary(nothing)
    release = Release("statistics", USER, event, settings, start, replies, canary, trains=False)
    return repeated(plan, release, everybody, releases, {"statistics": ", ".join(plan.run.statistics.of)})


def _far(update: Tensor, settings: RoundSettings, *, below: bool = False) -> Values:
    """An update and an answer that is far longer than may be, if the round has answers."""
    answer = torch.zeros(settings.answers.length) if settings.answers else None
    if answer is not None:
        answer[0] = LONG
    return Values(update.float(), below, answer)


def _replies(values: Values) -> Replies:
    """Those of a cohort of which the canary alone replies."""

    def replies(sent: int, source: RandomSource) -> list[TrainReply]:
        answer = None if values.answer is None else sent * values.answer
        return [TrainReply(1, sent * values.update, values.below == (sent > 0), answer=answer)] if sent else []

    return replies


def vectors(
    vector: SecureSum,
    make: MakeVector,
    within: tuple[TrainRequest, Values],
    without: tuple[TrainRequest, Values],
    other: tuple[TrainRequest, Values],
) -> Replies:
    """The sum of clients' noised vectors, as a server reads it: of the canary's client with the canary and without, and
    of the `other` honest clients."""

    def replies(sent: int, source: RandomSource) -> list[UnopenedSum]:
        parts = [within if sent else without, *[other] * (vector.summands - 1)]
        made = [make(vector, values, request, source.child(number)) for number, (request, values) in enumerate(parts)]
        total = torch.stack(made).sum(dim=0) % 2**vector.bits
        return [UnopenedSum(lambda: vector.centred(total), len(made))]

    return replies


def repeated(plan: Plan, release: Release, sampling: CohortSampling, count: int, facts: Facts) -> Experiment:
    """Scores `count` releases with the canary and as many without. How small a fault so many find is logged first.
    With cohorts of a fixed size neighbours replace a client, and a canary that is out sends the opposite.

    Raises:
      ConfigError: fewer than two releases.
    """

    def score(included: int, source: RandomSource) -> float:
        drawn = FIRST in sampling.draw(range(sampling.population_size), source.child("cohort"))
        sent = 1 if included else -1 if sampling.kind == "fixed" else 0
        return release.score(sent if drawn else 0, source.child("noise"))

    claim, noise = Claim.of(plan, release.guarantee, PrivacyLedger().record(release.event)), noise_of(release.event)
    releases = Releases(1, sampling.probability, noise, claim, repeated=True)
    logger.info("%s", outlook(releases, count))
    scores = scores_of(score, count, source_of(plan.seed).child("audit"))
    more: Facts = {
        "event": str(release.event),
        "sampling": f"{sampling.kind}, {sampling.probability:g}",
        "releases": count,
        "secure": plan.seed is None,
    }
    return Experiment(release.name, (Observation("run", claim, scores),), {**facts, **more}, releases)


def noise_of(event: DpEvent) -> float | None:
    """The noise multiplier of an event; None if it is not one Gaussian, as of a sampled cohort."""
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
