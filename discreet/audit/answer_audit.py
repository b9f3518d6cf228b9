"""The audit of answers to queries: private evaluation, rounds that are joined with it, and statistics.

The canary's answer is far longer than may be, and so is its update in a round whose cohort also rates the model; the
real cohort sampling, clipping and noise decide what is seen of it. No other client takes part: the auditor knows what
all others send, and would take it off.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from dp_accounting import DpEvent
from torch import Tensor

from discreet.audit.canaries import Auditor, draw_canaries
from discreet.audit.canary_scores import Experiment, Facts
from discreet.audit.repeated_release import Release, Score, repeated
from discreet.data.datasets import load_task
from discreet.evaluation.answer_sum import AnswerNoise, answer_round
from discreet.evaluation.private_statistics import data_query, statistics_noise
from discreet.mechanisms.central_gaussian import UserPrivacy
from discreet.privacy.randomness import RandomSource, source_of
from discreet.protocol.messages import TrainReply
from discreet.queries.query import STATISTICS
from discreet.server.plan import Plan, planned
from discreet.server.round import CohortSampling, RoundSettings, dp_fedavg_round
from discreet.server.run_plan import answers_of, cohort_sampling, evaluation_plan
from discreet.server.session import evaluation_query, resolve
from discreet.server.state import initial_state
from discreet.settings.privacy import PLANNED
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, client_settings

LONG = 1e4  # far beyond what an answer is clipped to
FIRST = 0  # the canary's number among the population's


def audit_answers(config: Settings, *, releases: int) -> Experiment:
    """Repeats one rating of a model, as `config` has it: by a cohort of its own; or with `evaluation.cohort=same` in a
    round, whose update, bit and answer are one release, and the score their log-likelihood ratio.

    Raises:
      ConfigError: clients do not rate the model, or there are fewer than two releases.
    """
    plan = planned(config)
    query = evaluation_query(plan.run, load_task(config.data.name, path=config.data.path))
    if query is None:
        raise ConfigError("evaluation.kind must be private: otherwise clients answer nothing that could be audited")
    if plan.mechanism is None:
        raise ConfigError("the answers that clients noise themselves are not audited: only those noised at the server")
    asked, paid = config.evaluation, plan.guarantees[0].adjacency
    facts: Facts = {"metrics": ", ".join(asked.metrics), "noise_multiplier": asked.noise_multiplier}
    if asked.cohort == "own":
        event = plan.mechanism.event(0.0, trains=False, rates=True, sizes=PLANNED)
        how = answers_of(plan, query)
        assert isinstance(how, AnswerNoise)
        score = _answers(how, event)
        return sampled(plan, cohort_sampling(plan), Release("private evaluation", event, paid, score, facts), releases)
    plan, _ = resolve(config)
    rated = evaluation_plan(plan)
    assert rated is not None
    user = rated.joined.release
    assert isinstance(user, UserPrivacy)
    score = _joined(plan, rated.joined)
    facts = {**facts, "noise_multiplier of the update": user.noise_multiplier}
    release = Release("a round that also rates the model", user.event, paid, score, facts)
    return sampled(plan, cohort_sampling(plan), release, releases)


def audit_statistics(config: Settings, *, releases: int) -> Experiment:
    """Repeats the release of statistics of clients' data, as `discreet statistics` and `data.normalise=private` ask for
    them: everybody answers.

    Raises:
      ConfigError: they are not paid for at user level, or there are fewer than two releases.
    """
    client_settings(config).check_server_noise("an audit of statistics")
    plan, task, asked = planned(config), load_task(config.data.name, path=config.data.path), config.statistics
    length = data_query(STATISTICS, plan, task).length
    facts: Facts = {"statistics": ", ".join(asked.of), "noise_multiplier": asked.noise_multiplier}
    score = _answers(statistics_noise(plan, length), asked.event)
    everybody = CohortSampling("everyone", 1.0, config.population_size)
    release = Release("statistics", asked.event, plan.guarantees[0].adjacency, score, facts)
    return sampled(plan, everybody, release, releases)


def sampled(plan: Plan, sampling: CohortSampling, release: Release, count: int) -> Experiment:
    """With cohorts of a fixed size neighbours replace a client, and a canary that is out sends the opposite."""

    def score(included: int, source: RandomSource) -> float:
        drawn = FIRST in sampling.draw(range(sampling.population_size), source.child("cohort"))
        sent = 1 if included else -1 if sampling.kind == "fixed" else 0
        return release.score(sent if drawn else 0, source.child("noise"))

    facts = {**release.facts, "sampling": f"{sampling.kind}, {sampling.probability:g}"}
    return repeated(plan, replace(release, score=score, facts=facts, probability=sampling.probability), count)


def _answers(how: AnswerNoise, event: DpEvent) -> Score:
    """Of answers alone: the first number of the release, all that the canary moves."""

    def score(sent: int, source: RandomSource) -> float:
        cohort = [TrainReply(1, torch.zeros(0), False, answer=_answer(sent, how.length))] if sent else []
        return float(answer_round(cohort, how, event=event, source=source, charge=lambda _: None).values[0])

    return score


def _answer(sent: int, length: int) -> Tensor:
    answer = torch.zeros(length)
    answer[0] = sent * LONG
    return answer


def _joined(plan: Plan, settings: RoundSettings) -> Score:
    """Of a round whose cohort also rates the model."""
    answers, clip_norm, num_params = settings.answers, plan.clip.norm, plan.num_params
    assert isinstance(answers, AnswerNoise)
    canaries = draw_canaries(1, num_params, source_of(plan.seed).child("audit"))
    auditor, start = Auditor.of(settings, canaries), initial_state(torch.zeros(num_params), clip_norm=clip_norm)
    update = (LONG * clip_norm * canaries.direction(0)).float()

    def score(sent: int, source: RandomSource) -> float:
        below = bool(canaries.bits[0]) == (sent > 0)
        cohort = [TrainReply(1, sent * update, below, answer=_answer(sent, answers.length))] if sent else []
        after, seen = dp_fedavg_round(start, cohort, settings, source=source, charge=lambda _: None)
        assert seen.answers is not None
        answer = float(seen.answers.values[0]) / answers.stddev**2
        return float(auditor.scores(start, after, seen.fraction_below)[0]) + answer

    return score
