"""The audit of private evaluation: the answers of one cohort are released again and again, with a client and without.

The canary's answer is far longer than may be; the real cohort sampling, clipping and noise decide what is seen of it.
The auditor knows all other answers, so that none are needed: what they add is known, and taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from discreet.audit.canary_scores import Claim, Experiment, Observation, RepeatedScores
from discreet.config import ConfigError, RunConfig
from discreet.federated.answer_sum import AnswerNoise, answer_round
from discreet.federated.guarantees import evaluation_event, guarantees_of
from discreet.federated.round import ClientUpdate
from discreet.federated.run_plan import answer_noise, cohort_sampling
from discreet.federated.session import evaluation_query
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.randomness import RandomSource, source_of
from discreet.tasks.datasets import load_task

LONG = 1e4  # far beyond what an answer is clipped to
FIRST = 0  # the canary's number among the population's


@dataclass(frozen=True)
class AnswerAudit:
    """What is put to the test: `releases` with the canary in the population, and as many without it."""

    releases: int = 2000


def audit_answers(config: RunConfig, audit: AnswerAudit) -> Experiment:
    """Repeats one rating of a model by a cohort of its own, as `config` has it.

    With cohorts of a fixed size neighbours replace a client, and a canary that is out answers the opposite.

    Raises:
      ConfigError: clients do not rate the model, or there are fewer than two releases.
    """
    query = evaluation_query(config, load_task(config.data.name, path=config.data.path))
    if query is None:
        raise ConfigError("evaluation.kind must be private: otherwise clients answer nothing that could be audited")
    if config.privacy.example.enabled:
        raise ConfigError("the answers that clients noise themselves are not audited: privacy.example.enabled is true")
    if audit.releases < 2:
        raise ConfigError(f"an audit needs at least two releases of the answers (got {audit.releases})")
    source = source_of(config.seed).child("audit")
    scores = _released(config, answer_noise(config, query.length), audit.releases, source)
    spent = PrivacyLedger().record(evaluation_event(config))
    claim = Claim.of(config.privacy, spent, guarantees_of(config)[0].adjacency)
    facts: dict[str, str | int | float | bool] = {
        "releases": audit.releases,
        "metrics": ", ".join(config.evaluation.metrics),
        "noise_multiplier": config.evaluation.noise_multiplier,
        "sampling": f"{config.sampling.kind}, {config.sampling_probability:g}",
        "secure": config.seed is None,
    }
    everybody = config.sampling.kind == "everyone"
    return Experiment("private evaluation", (Observation("run", claim, scores),), facts, gaussian=everybody)


def _released(config: RunConfig, how: AnswerNoise, count: int, source: RandomSource) -> RepeatedScores:
    """The first number of each release: all that the canary moves."""
    event, sampling = evaluation_event(config), cohort_sampling(config)
    answer = torch.zeros(how.length)
    answer[0] = LONG
    absent = [ClientUpdate(torch.zeros(0), False, -answer)] if config.sampling.kind == "fixed" else []

    def one(included: bool, drawn: RandomSource) -> float:
        parts = [ClientUpdate(torch.zeros(0), False, answer)] if included else absent
        cohort = parts if sampling.draw(range(config.population_size), drawn.child("cohort")).count(FIRST) else []
        sums = answer_round(cohort, how, event=event, source=drawn.child("noise"), charge=lambda _: None)
        return float(sums.values[0])

    worlds = (
        np.array([one(included, source.child(str(included), number)) for number in range(count)])
        for included in (True, False)
    )
    return RepeatedScores(*worlds)
