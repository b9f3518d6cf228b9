"""From settings to the plan of a run: the law of its cohorts, and a round's public constants."""

from __future__ import annotations

from dataclasses import dataclass

from discreet.evaluation.answer_sum import AnswerNoise, NoisedByClients, server_noise
from discreet.evaluation.private_evaluation import EvaluationPlan
from discreet.mechanisms.mechanism import PlainSum, expected_cohort, terms_of
from discreet.mechanisms.mechanism_table import own_noise, server_mechanism
from discreet.queries.query import Query
from discreet.server.round import CohortSampling, RoundSettings
from discreet.server.server_optimizer import server_optimizer
from discreet.settings.privacy import PLANNED, Sizes
from discreet.settings.run_config import RunConfig, client_settings


@dataclass(frozen=True)
class Plan:
    """The public constants of a run.

    Attributes:
      chance_loss: of a model that gives 0 throughout: every class the same chance, or the middle of every range;
        infinity if it is not known.
      evaluation: how clients rate models; None if they do not.
    """

    settings: RoundSettings
    sampling: CohortSampling
    chance_loss: float
    evaluation: EvaluationPlan | None = None

    def joins(self, number: int) -> bool:
        """True if the cohort of a round also rates the model that it starts from."""
        return self.evaluation is not None and self.evaluation.config.joins(number)

    def settings_of(self, number: int) -> RoundSettings:
        """The constants of a round."""
        return self.evaluation.joined if self.evaluation and self.joins(number) else self.settings


def cohort_sampling(config: RunConfig) -> CohortSampling:
    """The sampling of a configuration's cohorts."""
    return CohortSampling(config.sampling.kind, config.sampling_probability, config.population_size)


def round_settings(
    config: RunConfig, sizes: Sizes = PLANNED, *, answers: AnswerNoise | NoisedByClients | None = None
) -> RoundSettings:
    """A round's public constants, of a configuration whose noise is resolved.

    Args:
      sizes: of what is masked under secure aggregation.
      answers: how answers to a query are released, for rounds in which clients also rate the model.
    """
    run = client_settings(config)
    mechanism, clip = server_mechanism(run), config.privacy.user.clip
    release = PlainSum() if mechanism is None else mechanism.server_release(clip, sizes, rates=answers is not None)
    return RoundSettings(expected_cohort(run), server_optimizer(config.server), release, answers)


def answer_noise(config: RunConfig, length: int) -> AnswerNoise:
    """The release of the sum of answers of `length` numbers, see `AnswerNoise`."""
    return server_noise(
        config,
        length,
        expected_cohort=expected_cohort(client_settings(config)),
        noise_multiplier=config.evaluation.noise_multiplier,
        probability=config.sampling_probability,
    )


def answers_of(config: RunConfig, query: Query) -> AnswerNoise | NoisedByClients:
    """The release of answers to a query: noised at the server, or by each client."""
    run = client_settings(config)
    own, noise_multiplier = own_noise(run, query.l1_norm), run.evaluation.noise_multiplier
    if own is None:
        return answer_noise(config, query.length)
    law = noise_multiplier, config.sampling_probability, own.unit
    return NoisedByClients(query.length, expected_cohort(run), *law, of_examples=own.of_examples)


def evaluation_plan(config: RunConfig, query: Query, *, num_params: int = 1) -> EvaluationPlan:
    """The plan of a run with evaluation.kind=private, see `EvaluationPlan`. `num_params`: of its model."""
    sizes, mechanism, event = Sizes(num_params, query.length), server_mechanism(client_settings(config)), None
    if mechanism is not None:
        noise = terms_of(mechanism).noise_multiplier
        assert noise is not None
        event = mechanism.event(noise, trains=False, rates=True, sizes=sizes)
    joined = round_settings(config, sizes, answers=answers_of(config, query))
    return EvaluationPlan(config.evaluation, query, joined, event)


def plan_of(config: RunConfig, *, num_params: int, chance_loss: float, query: Query | None = None) -> Plan:
    """The plan of a run. `query`: asked of models, if clients rate them."""
    return Plan(
        settings=round_settings(config, Sizes(num_params, 1 if query is None else query.length)),
        sampling=cohort_sampling(config),
        chance_loss=chance_loss,
        evaluation=None if query is None else evaluation_plan(config, query, num_params=num_params),
    )
