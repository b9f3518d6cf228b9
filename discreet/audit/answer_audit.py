"""The audit of answers to queries: private evaluation, rounds that are joined with it, and statistics.

One release is made again and again, with a client and without. The canary's answer is far longer than may be, and so is
its update in a round whose cohort also rates the model; the real cohort sampling, clipping and noise decide what is
seen of it. The auditor knows what all others send, so that none are needed: what they add is known, and taken off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from dp_accounting import DpEvent
from torch import Tensor

from discreet.audit.auditor import noised_sum
from discreet.audit.canaries import draw_canaries
from discreet.audit.canary_scores import Claim, Experiment, Observation, Releases, RepeatedScores
from discreet.config import ConfigError, RunConfig
from discreet.federated.answer_sum import AnswerNoise, answer_round
from discreet.federated.guarantees import evaluation_event, guarantees_of
from discreet.federated.messages import TrainReply
from discreet.federated.private_statistics import data_shape, statistics_noise
from discreet.federated.query import Query
from discreet.federated.round import CohortSampling, RoundSettings, dp_fedavg_round
from discreet.federated.run_plan import answer_noise, cohort_sampling, evaluation_plan
from discreet.federated.session import checked, evaluation_query
from discreet.federated.state import initial_state
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.quantile import BIT_SENSITIVITY
from discreet.privacy.randomness import RandomSource, source_of
from discreet.settings import client_settings
from discreet.tasks.datasets import load_task
from discreet.tasks.model_check import num_params_of
from discreet.tasks.statistic_answers import statistic_blocks

LONG = 1e4  # far beyond what an answer is clipped to
FIRST = 0  # the canary's number among the population's

# What a cohort's replies, of the canary or of nobody, are released as: a score of that release.
Release = Callable[[Sequence[TrainReply], RandomSource], float]
Facts = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class AnswerAudit:
    """What is put to the test: `releases` with the canary in the population, and as many without it."""

    releases: int = 2000


@dataclass(frozen=True)
class Asked:
    """A release that is made again and again.

    Attributes:
      mechanism: in words.
      release: makes it.
      event: what it costs.
      canary: what the canary sends.
      sampling: how the cohort is drawn.
      facts: of its settings, for audit.json.
    """

    mechanism: str
    release: Release
    event: DpEvent
    canary: TrainReply
    sampling: CohortSampling
    facts: Facts


def audit_answers(config: RunConfig, audit: AnswerAudit) -> Experiment:
    """Repeats one rating of a model, as `config` has it: by a cohort of its own; or with `evaluation.cohort=same` in a
    round, whose update, bit and answer are one release, and the score their log-likelihood ratio.

    With cohorts of a fixed size neighbours replace a client, and a canary that is out sends the opposite.

    Raises:
      ConfigError: clients do not rate the model, or there are fewer than two releases.
    """
    assert not config.privacy.user.secure, "discreet.audit.secure_audit opens the sum that rates the model"
    query = evaluation_query(config, load_task(config.data.name, path=config.data.path))
    if query is None:
        raise ConfigError("evaluation.kind must be private: otherwise clients answer nothing that could be audited")
    if client_settings(config).rates_itself:
        raise ConfigError("the answers that clients noise themselves are not audited: only those noised at the server")
    asked = _rating(config, query) if config.evaluation.cohort == "own" else _joined(config, query)
    return _repeated(config, audit, asked)


def audit_statistics(config: RunConfig, audit: AnswerAudit) -> Experiment:
    """Repeats the release of statistics of clients' data, as `discreet statistics` and `data.normalise=private` ask for
    them: everybody answers.

    Raises:
      ConfigError: they are not paid for at user level, or there are fewer than two releases.
    """
    client_settings(config).check_server_noise("an audit of statistics")
    task = load_task(config.data.name, path=config.data.path)
    length = Query(statistic_blocks(config.statistics.of, data_shape(config, task)), task.shape).length
    how, event = statistics_noise(config, length), config.statistics.event
    everybody = CohortSampling("everyone", 1.0, config.population_size)
    facts: Facts = {
        "statistics": ", ".join(config.statistics.of),
        "noise_multiplier": config.statistics.noise_multiplier,
    }
    return _repeated(
        config, audit, Asked("statistics", _answered(how, event), event, _answer(length), everybody, facts)
    )


def _answer(length: int) -> TrainReply:
    """A canary that answers, and is asked for nothing else."""
    answer = torch.zeros(length)
    answer[0] = LONG
    return TrainReply(1, torch.zeros(0), False, answer=answer)


def _answered(how: AnswerNoise, event: DpEvent) -> Release:
    """Answers alone: the score is the first number of the release, all that the canary moves."""

    def release(cohort: Sequence[TrainReply], source: RandomSource) -> float:
        return float(answer_round(cohort, how, event=event, source=source, charge=lambda _: None).values[0])

    return release


def _rating(config: RunConfig, query: Query) -> Asked:
    how, event, sampling = answer_noise(config, query.length), evaluation_event(config), cohort_sampling(config)
    release, canary = _answered(how, event), _answer(query.length)
    return Asked("private evaluation", release, event, canary, sampling, _rating_facts(config))


def _rating_facts(config: RunConfig) -> Facts:
    asked = config.evaluation
    return {"metrics": ", ".join(asked.metrics), "noise_multiplier": asked.noise_multiplier}


def _joined(config: RunConfig, query: Query) -> Asked:
    resolved, task = checked(config)
    settings = evaluation_plan(resolved, query).joined
    assert settings.user is not None
    size, clip_norm = num_params_of(resolved.model.name, task), resolved.privacy.user.clip.norm
    direction = draw_canaries(1, size, source_of(config.seed).child("audit")).direction(0)
    canary = replace(_answer(query.length), update=(LONG * clip_norm * direction).float(), below=True)
    return Asked(
        "a round that also rates the model",
        _round(settings, direction, clip_norm),
        settings.user.event,
        canary,
        cohort_sampling(resolved),
        _rating_facts(resolved) | {"noise_multiplier of the update": settings.user.noise_multiplier},
    )


def _round(settings: RoundSettings, direction: Tensor, clip_norm: float) -> Release:
    """A round that is joined with a rating: the score is a log-likelihood ratio, up to a constant."""
    user, answers = settings.user, settings.answers
    assert user is not None
    assert isinstance(answers, AnswerNoise)
    start, cohort_size = initial_state(torch.zeros_like(direction), clip_norm=clip_norm), settings.expected_cohort

    def release(cohort: Sequence[TrainReply], source: RandomSource) -> float:
        after, seen = dp_fedavg_round(start, cohort, settings, source=source, charge=lambda _: None)
        assert seen.answers is not None
        moved = float(noised_sum(settings, start, after) @ direction)
        score = moved / (clip_norm * user.update_noise_multiplier**2) + seen.answers.values[0] / answers.stddev**2
        # A fraction that was clamped to 0 or 1 hides the count.
        if user.count_stddev and seen.fraction_below is not None and 0 < seen.fraction_below < 1:
            count = (seen.fraction_below - 0.5) * cohort_size
            score += BIT_SENSITIVITY * count / user.count_stddev**2
        return score

    return release


def _opposite(canary: TrainReply) -> TrainReply:
    assert canary.answer is not None
    return TrainReply(1, -canary.update, not canary.below, answer=-canary.answer)


def _repeated(config: RunConfig, audit: AnswerAudit, asked: Asked) -> Experiment:
    if audit.releases < 2:
        raise ConfigError(f"an audit needs at least two releases of the answers (got {audit.releases})")
    sampling, canary = asked.sampling, asked.canary
    worlds = {True: [canary], False: [_opposite(canary)] if sampling.kind == "fixed" else []}
    source = source_of(config.seed).child("audit")

    def one(included: bool, source: RandomSource) -> float:
        drawn = sampling.draw(range(config.population_size), source.child("cohort")).count(FIRST)
        return asked.release(worlds[included] if drawn else [], source.child("noise"))

    scores = RepeatedScores(
        *(
            np.array([one(included, source.child(str(included), number)) for number in range(audit.releases)])
            for included in (True, False)
        )
    )
    claim = Claim.of(config.privacy, PrivacyLedger().record(asked.event), guarantees_of(config)[0].adjacency)
    facts = asked.facts | {
        "releases": audit.releases,
        "sampling": f"{sampling.kind}, {sampling.probability:g}",
        "secure": config.seed is None,
    }
    everybody = sampling.kind == "everyone"
    noise = getattr(asked.event, "noise_multiplier", math.nan)  # a sampled event has none, and is not fitted
    releases = Releases(1, sampling.probability, noise, claim.epsilon, claim.delta, repeated=True, gaussian=everybody)
    return Experiment(asked.mechanism, (Observation("run", claim, scores),), facts, releases)
