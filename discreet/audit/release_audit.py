"""Audits that repeat a release with a canary and without it: a round, an evaluation of a model,
statistics, a step that clients share, or a release that a client noises itself.

The canary is far longer than the clip norm; the real cohort sampling, clipping and noise decide how
much of it shows. No other client takes part: the auditor knows what all others send, and would
subtract it. Under secure aggregation only the honest clients of the worst case take part, n - d - c
of them: contributions of more clients, and the noise that colluding clients know and subtract, do
not make a sum easier to read. Masks do not change a sum, so they are left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor, nn

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.audit.canaries import (
    Auditor,
    Canary,
    Claim,
    Experiment,
    Facts,
    Releases,
    Scores,
    draw_canaries,
    observed,
)
from discreet.audit.example_audit import model_and_examples
from discreet.audit.user_audit import check_noised, event_of
from discreet.audit.verdict import outlook
from discreet.data.examples import Examples, Task
from discreet.mechanisms.client_noise import LocalPrivacy, release_update
from discreet.mechanisms.local_noise import release_step, round_privacy
from discreet.mechanisms.mechanism import Mechanism
from discreet.mechanisms.round_state import RoundStart
from discreet.mechanisms.sums import AnswerMechanism, PartialReply, UnopenedSum
from discreet.models.models import flatten_parameters
from discreet.node.account import Refused
from discreet.node.client import Client, ExactReply, noised_vector
from discreet.node.policy import ClientPolicy
from discreet.node.work import work_of
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.planning.plan import Plan
from discreet.privacy.randomness import RandomSource, secure_source, source_of
from discreet.privacy.sampling import CohortSampling
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import EVALUATION, STATISTICS, Assignment, TrainReply, TrainRequest
from discreet.queries.query import query_of
from discreet.server.data_questions import statistics_noise
from discreet.server.model_ratings import RatingPlan, rating_plan
from discreet.settings.adjacency import EXAMPLE, LOCAL, USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.rules import ConfigError
from discreet.training.local_training import LocalSettings, settings_without_noise
from discreet.training.losses import loss_of

logger = logging.getLogger("discreet")

LONG = 1e4  # times the clip norm
COORDINATES = 8  # of a local mechanism's release: more would reveal no more, and take time
EXAMPLES = 4  # of a client that takes one full-batch step
FIRST = 0  # the canary's number in the population
NOTHING = "nothing"  # the query of a request that asks for no update, and that no client answers
LOOKED_AT = 256  # examples of a client among which the canary is chosen
# By the work of a cohort (trains, rates): the release of a server that reads replies, and of one
# that opens a sum.
NAMES = {
    (True, False): ("one round of the mechanism", "a masked sum"),
    (True, True): ("a round that also rates the model", "a masked sum that also rates the model"),
    (False, True): ("private evaluation", "a masked sum of ratings"),
}

ALONE = CohortSampling("everyone", 1.0, 1)
# The score of one release: 1 with the canary, 0 without, -1 with its opposite.
Score = Callable[[int, RandomSource], float]
# The replies of a cohort, with the canary, without it, or with its opposite, as for a score.
Replies = Callable[[int, RandomSource], Sequence[TrainReply | UnopenedSum]]


@dataclass(frozen=True, eq=False)
class Repeated:
    """Releases that are repeated, and charged to a guarantee."""

    name: str
    guarantee: str
    # the event and the score of each release; several are also scored together
    rounds: Sequence[tuple[DpEvent, Score]]
    sampling: CohortSampling = ALONE  # of the cohort, which may include the canary
    facts: Facts = field(default_factory=dict)

    def experiment(self, plan: Plan, count: int) -> Experiment:
        """Scores `count` releases with the canary and as many without, after logging the smallest
        fault that this number can find. Raises ConfigError: `count` is below two."""
        if count < 2:
            raise ConfigError(f"an audit needs at least two releases of either kind (got {count})")
        events = [event for event, _ in self.rounds]
        spent = [
            PrivacyLedger(tuple((event, 1) for event in each))
            for each in (*zip(events, strict=True), events)
        ]
        *claims, claim = (Claim.of(plan, self.guarantee, each) for each in spent)
        releases = Releases(1, self.sampling.probability, _noise_of(events), claim, repeated=True)
        logger.info("%s", outlook(releases, count, rounds=len(events) if len(events) > 1 else 0))
        source = source_of(plan.seed).child("audit")
        scores = list[Scores]()
        for number, (_, score) in enumerate(self.rounds, 1):
            scores.append(self._scores(score, count, source.child("round", number)))
        facts: Facts = {
            **self.facts,
            "event": str(events[0]),
            "sampling": f"{self.sampling.kind}, {self.sampling.probability:g}",
            "releases": count,
            "rounds": len(events),
            "secure": plan.seed is None,
        }
        seen = observed(list(zip(claims, scores, strict=True)), claim)
        return Experiment(
            self.name,
            seen[-1:] if len(events) == 1 else seen,
            facts,
            releases,
        )

    def _scores(self, score: Score, count: int, source: RandomSource) -> Scores:
        """The scores of repeated releases. With cohorts of a fixed size adjacency replaces a
        client: a canary that is out sends the opposite."""
        included = np.arange(2 * count) < count
        population = range(self.sampling.population_size)
        values = []
        out = 0
        if self.sampling.kind == "fixed":
            out = -1
        for number, is_in in enumerate(included):
            own = source.child(str(is_in), number % count)
            drawn = FIRST in self.sampling.draw(population, own.child("cohort"))
            sent = drawn * (1 if is_in else out)
            values.append(score(sent, own.child("noise")))
        return Scores(np.array(values), included)


def _noise_of(events: Sequence[DpEvent]) -> float | None:
    """The noise multiplier of the single Gaussian that all events amount to; None if one is not
    Gaussian, as with a sampled cohort."""
    precision = 0.0
    for event in events:
        if isinstance(event, DistributedDiscreteGaussianDpEvent):
            precision += event.sensitivity_squared / (event.summands * event.variance)
        elif isinstance(event, GaussianDpEvent):
            precision += event.noise_multiplier**-2
        else:
            return None
    return 1 / math.sqrt(precision)


def audit_round(plan: Plan, *, releases: int, of_answers: bool = False) -> Experiment:
    """Repeats the first round of a run, and scores the canary by all of its releases: the update,
    the count, and with `evaluation.cohort=same` the query answers, which are charged together as
    one release.

    Args:
      of_answers: audits the evaluation of the model, alone if it has a separate cohort.

    Raises:
      ConfigError: there is no noise at user level, answers are to be audited but clients answer no
        query, or there are fewer than two releases.
    """
    rated = rating_plan(plan)
    own = plan.run.evaluation.cohort == "own"
    if of_answers:
        _check_answers(plan, rated)
    check_noised(plan)
    rates = rated is not None and (of_answers or not own)
    trains = not (of_answers and own)
    start = _start_of(plan, rates_too=rates and trains)
    directions = source_of(plan.seed).child("audit").child("direction")
    drawn = draw_canaries(1, plan.num_params, directions)
    if rated and rates:
        length = rated.answers.length
    else:
        length = None
    values = _far(LONG * start.clip_norm * drawn.direction(0), length, below=bool(drawn.bits[0]))
    vector = plan.mechanism.participation.vector
    if vector is not None:
        asked = Assignment(trains, EVALUATION if rates else "")
        replies = _masked_replies(plan.run, vector, start, values, asked)
    else:
        replies = _replies(values)
    if trains or rated is None:
        event = plan.mechanism.event(start.round + 1)
        if vector is None:
            added = _clipped_canary(plan.mechanism, start, values)
        else:
            added = drawn.direction(0)
        score = _of_round(plan, start, replies, Canary(added, values.below))
    else:
        event = rated.event
        score = _of_answers(rated.mechanism, start, replies)
    assert event is not None
    facts: dict[str, str] = {}
    if rates:
        facts["metrics"] = ", ".join(plan.run.evaluation.metrics)
    name = NAMES[trains, rates][vector is not None]
    return Repeated(name, USER, [(event, score)], plan.sampling, facts).experiment(plan, releases)


def _masked_replies(
    run: ClientSettings,
    vector: SecureSum,
    start: RoundStart,
    values: ExactReply,
    asked: Assignment,
) -> Replies:
    """The masked replies of a cohort, with the canary or without: its client does the work, and two
    honest clients contribute noise alone."""
    request = TrainRequest(start.round + 1, start.clip_norm, run, work=asked)
    nothing = replace(request, work=Assignment(trains=False, query=NOTHING))
    silent = (nothing, ExactReply(values.update))
    return vectors(vector, [(request, values), silent, silent])


def _clipped_canary(mechanism: Mechanism, start: RoundStart, values: ExactReply) -> Tensor:
    """The canary's contribution to the sum, in units of the norm that the noise refers to."""
    total: PartialReply = mechanism.add_up(
        [TrainReply(1, values.update, values.below)], start
    ).part()
    return total.in_floats / mechanism.expected_noise(start.clip_norm).norm


def _start_of(plan: Plan, *, rates_too: bool) -> RoundStart:
    """The start of the first round; `rates_too`: of the first one that evaluates the model too."""
    if rates_too:
        before = plan.run.evaluation.every
    else:
        before = 0
    return RoundStart(before, torch.zeros(plan.num_params), plan.first_clip_norm)


def _check_answers(plan: Plan, rated: RatingPlan | None) -> None:
    """Raises ConfigError if no answers are noised at the server."""
    if rated is None:
        raise ConfigError(
            "evaluation.kind must be private: otherwise clients answer nothing that could be "
            "audited"
        )
    if not plan.charges_server:
        raise ConfigError(
            "the answers that clients noise themselves are not audited: only those noised at the "
            "server"
        )


def audit_statistics(plan: Plan, task: Task, *, releases: int) -> Experiment:
    """Repeats the release of statistics of clients' data, as in `discreet statistics` and
    `data.normalise=private`: every client answers. Raises ConfigError: they are not charged at user
    level, or there are fewer than two releases."""
    plan.run.check_server_noise("an audit of statistics")
    query = query_of(STATISTICS, plan.run, task.shape)
    nothing = torch.zeros(0)
    event = plan.run.statistics.event
    replies = _replies(_far(nothing, query.length))
    start = RoundStart(0, nothing, 1.0)
    score = _of_answers(statistics_noise(plan, query.length), start, replies)
    facts = {"statistics": ", ".join(plan.run.statistics.of)}
    return Repeated("statistics", USER, [(event, score)], facts=facts).experiment(plan, releases)


def audit_shared_step(plan: Plan, task: Task, *, releases: int) -> Experiment:
    """Repeats the first step of a run with `privacy.example.aggregation=secure`, and scores an
    example of client 0 by its effect on the opened sum.

    The canary is the example with the longest gradient, with its inputs made far larger. It goes
    through the client's own clipping and sum like all examples.

    Raises:
      ConfigError: the guarantee has no noise, the client has no example or more than it may have,
        or there are fewer than two releases.
    """
    masked = plan.run.gives(EXAMPLE) and plan.run.masked
    if not masked or not plan.noised(EXAMPLE):
        raise ConfigError(
            "an audit of a shared step needs privacy.example.aggregation=secure, with noise"
        )
    request, params, without, within = step_parts(plan, task)
    added = within.update - without.update
    start = RoundStart(0, params, math.inf)
    silent = replace(without, update=torch.zeros_like(added))
    parts = [(request, values) for values in (within, without, silent)]
    vector = plan.mechanism.participation.vector
    assert vector is not None
    replies = vectors(vector, parts)
    canary = added.double() / plan.mechanism.expected_noise(math.inf).norm
    score = _of_round(plan, start, replies, Canary(canary), known=without.update)
    rounds = [(event_of(plan.mechanism, 1), score)]
    return Repeated("a step that clients share", EXAMPLE, rounds, plan.sampling).experiment(
        plan, releases
    )


def audit_local(plan: Plan, *, releases: int, rounds: int = 1) -> Experiment:
    """Repeats the local mechanism of the first rounds of a run on a canary and on its opposite.
    Everybody sees what a client sends, so the strongest test is one canary as far from its opposite
    as clipping allows.

    `gaussian`, `laplace`: the update is one long vector along one coordinate, or its negative.
    `laplace_step`: one example of a linear model has a long input, or its negative; the others are
    known.

    Raises:
      ConfigError: there is no local privacy, or there are fewer rounds, or fewer than two releases.
    """
    run = plan.run
    if LOCAL not in plan.mechanisms:
        raise ConfigError(
            "privacy.local.kind must not be none: without noise there is no claim to audit"
        )
    if not 1 <= rounds <= run.rounds:
        raise ConfigError(f"an audit needs 1 .. {run.rounds} rounds (got {rounds})")
    training = settings_without_noise(run.training)
    privacies = [round_privacy(run, round_number=number) for number in range(1, rounds + 1)]
    scored = [(privacy.event, _local_score(privacy, training)) for privacy in privacies]
    facts: Facts = {"kind": run.local.kind, "noise": run.noise}
    return Repeated("local level", LOCAL, scored, facts=facts).experiment(plan, releases)


def _local_score(privacy: LocalPrivacy, training: LocalSettings) -> Score:
    """The log-likelihood ratio of a release, up to a factor that is the same in each round, for an
    auditor who knows both possible results without noise."""
    still = replace(privacy, noise_multiplier=0.0)
    if privacy.kind == "gaussian":
        power = 2
    else:
        power = 1
    ours, theirs = (
        _released(still, training, included, secure_source()).double() for included in (1, 0)
    )

    def score(included: int, source: RandomSource) -> float:
        released = _released(privacy, training, included, source).double()
        ratio = (released - theirs).abs() ** power - (released - ours).abs() ** power
        return float(ratio.sum()) / privacy.noise_multiplier**power

    return score


def _released(
    privacy: LocalPrivacy, training: LocalSettings, included: int, source: RandomSource
) -> Tensor:
    if included:
        far = LONG
    else:
        far = -LONG
    if privacy.kind != "laplace_step":
        update = torch.zeros(COORDINATES)
        update[0] = far
        return release_update(update, privacy, source=source)
    model = nn.Linear(COORDINATES // 2, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # so that the gradients of the two units are opposite
    inputs = torch.zeros(EXAMPLES, COORDINATES // 2)
    inputs[0, 0] = far
    examples = Examples(inputs, torch.zeros(EXAMPLES, dtype=torch.int64))
    return release_step(model, examples, training=training, privacy=privacy, source=source)


def step_parts(plan: Plan, task: Task) -> tuple[TrainRequest, Tensor, ExactReply, ExactReply]:
    """The request of a run's first step, its parameters, and client 0's answer without the canary
    and with it."""
    model, examples = model_and_examples(plan, task)
    if len(examples) == 0:
        raise ConfigError("client 0 has no example that could be a canary")
    request = TrainRequest(1, math.inf, plan.run)
    params = flatten_parameters(model)
    canary = _worst_of(examples, model, plan.run)
    more = Examples(
        torch.cat([examples.inputs, canary.inputs]), torch.cat([examples.targets, canary.targets])
    )
    work = work_of(request)
    nodes = (
        Client(model, share, None, ClientPolicy(), source_of(plan.seed))
        for share in (examples, more)
    )
    try:
        # A client of a run does not send these values.
        without, within = (
            node._values(work, params, node._admitted(work, params)) for node in nodes
        )
    except Refused as refusal:
        raise ConfigError(str(refusal)) from refusal
    return request, params, without, within


def _worst_of(examples: Examples, model: nn.Module, run: ClientSettings) -> Examples:
    """The one of the first examples with the longest gradient; its inputs are made far larger if
    they are numbers."""
    few = examples.subset(torch.arange(min(LOOKED_AT, len(examples))))
    if few.inputs.is_floating_point():
        few = Examples(few.inputs * LONG, few.targets)
    clip = run.example.clip_norm
    loss = loss_of(run.task)
    _, norms = clipped_gradient_sum(
        model, few.inputs, targets=few.targets, clip_norm=clip, loss=loss
    )
    return few.subset(norms.nan_to_num(posinf=0.0).argmax().reshape(1))


def _of_round(
    plan: Plan, start: RoundStart, replies: Replies, canary: Canary, *, known: Tensor | float = 0.0
) -> Score:
    """The log-likelihood ratio of in and out, up to constants; `known`: the other clients' part of
    the sum of updates."""

    def score(sent: int, source: RandomSource) -> float:
        summed = plan.mechanism.add_up(replies(sent, source), start)
        seen = plan.mechanism.release(summed, start, source)
        (found,) = Auditor(plan, canary).scores(
            seen.total, start.clip_norm, seen.fraction_below, known=known
        )
        return float(
            found
            if seen.answers is None
            else found + seen.answers.values[0] / seen.answers.stddev**2
        )

    return score


def _of_answers(answers: AnswerMechanism, start: RoundStart, replies: Replies) -> Score:
    """Scores by the first number of the answers, for a round that releases nothing else."""

    def score(sent: int, source: RandomSource) -> float:
        summed = answers.add_up(replies(sent, source), start)
        return float(answers.release(summed, start, source).values[0])

    return score


def _far(update: Tensor, length: int | None, *, below: bool = False) -> ExactReply:
    """An update and, if the round has answers, an answer of this length; both are far above their
    norm bounds."""
    answer = None
    if length is not None:
        answer = torch.zeros(length)
        answer[0] = LONG
    return ExactReply(update.float(), below, answer)


def _replies(values: ExactReply) -> Replies:
    """The replies of a cohort in which only the canary replies."""

    def replies(sent: int, source: RandomSource) -> list[TrainReply]:
        if values.answer is None:
            answer = None
        else:
            answer = sent * values.answer
        if sent:
            return [TrainReply(1, sent * values.update, values.below == (sent > 0), answer=answer)]
        return []

    return replies


def vectors(vector: SecureSum, parts: Sequence[tuple[TrainRequest, ExactReply]]) -> Replies:
    """The sum of clients' noised vectors, as a server reads it. `parts`: those of the canary's
    client with and without the canary, and of each other honest client."""
    within, without, other = parts

    def replies(sent: int, source: RandomSource) -> list[UnopenedSum]:
        sums = [within if sent else without, *[other] * (vector.summands - 1)]
        made = [
            noised_vector(vector, each, asked, source.child(number))
            for number, (asked, each) in enumerate(sums)
        ]
        total = torch.stack(made).sum(dim=0) % 2**vector.bits
        return [UnopenedSum(lambda: vector.centred(total), len(made))]

    return replies
