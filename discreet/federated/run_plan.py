"""From settings to the plan of a run: the law of its cohorts, and a round's public constants."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from discreet.federated.answer_sum import AnswerNoise, NoisedByClients, server_noise
from discreet.federated.guarantees import count_stddev, evaluation_event, expected_cohort, user_event
from discreet.federated.private_evaluation import EvaluationPlan
from discreet.federated.query import Query
from discreet.federated.round import CohortSampling, RoundSettings, UserPrivacy
from discreet.federated.server_optimizer import server_optimizer
from discreet.settings.privacy import PLANNED, PRIVACY_DRAWS, Sizes
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
        """Whether the cohort of a round also rates the model that it starts from."""
        return self.evaluation is not None and self.evaluation.config.joins(number)

    def settings_of(self, number: int) -> RoundSettings:
        """The constants of a round."""
        return self.evaluation.joined if self.evaluation and self.joins(number) else self.settings


def cohort_sampling(config: RunConfig) -> CohortSampling:
    """How the cohorts of a configuration are drawn."""
    return CohortSampling(config.sampling.kind, config.sampling_probability, config.population_size)


def round_settings(config: RunConfig, sizes: Sizes = PLANNED) -> RoundSettings:
    """A round's public constants, of a configuration whose noise is resolved. `sizes`: of what is masked under secure
    aggregation."""
    clients = client_settings(config)
    return RoundSettings(
        expected_cohort=expected_cohort(config),
        optimizer=server_optimizer(config.server),
        user=_user_privacy(config, sizes) if config.privacy.user.enabled else None,
        secure=clients.secure_sum(sizes) if clients.masked else None,
        norm=clients.step_norm if clients.example.secure else None,
    )


def answer_noise(config: RunConfig, length: int) -> AnswerNoise:
    """How the sum of answers of so many numbers is released, see `AnswerNoise`."""
    return server_noise(
        config,
        length,
        expected_cohort=expected_cohort(config),
        noise_multiplier=config.evaluation.noise_multiplier,
        probability=config.sampling_probability,
    )


def answers_of(config: RunConfig, query: Query) -> AnswerNoise | NoisedByClients:
    """How answers to a query are released: noised at the server, or by each client."""
    if not client_settings(config).rates_itself:
        return answer_noise(config, query.length)
    cohort, probability = expected_cohort(config), config.sampling_probability
    kind, noise_multiplier = config.privacy.local.kind, config.evaluation.noise_multiplier
    if kind == "none":
        return NoisedByClients(query.length, cohort, noise_multiplier, probability)
    # Laplace noise is for the L1 norm, and its standard deviation is sqrt(2) times its scale.
    unit = 2.0 if kind == "gaussian" else 2 * math.sqrt(2) * query.l1_norm
    return NoisedByClients(query.length, cohort, noise_multiplier, probability, unit, of_examples=False)


def _user_privacy(config: RunConfig, sizes: Sizes) -> UserPrivacy:
    user = config.privacy.user
    assert user.noise_multiplier is not None
    return UserPrivacy(
        noise_multiplier=user.noise_multiplier,
        event=user_event(config, user.noise_multiplier, sizes=sizes),
        count_stddev=count_stddev(config),
        target_quantile=user.clip.target_quantile,
        clip_learning_rate=user.clip.learning_rate,
        clip_max=user.clip.ceiling,
        clip_search_rate=user.clip.search_rate,
        draws=PRIVACY_DRAWS.get(config.privacy.noise, 1),
        on_grid=config.privacy.noise == "grid",
        largest_cohort=config.population_size,
    )


def evaluation_plan(config: RunConfig, query: Query, *, num_params: int = 1) -> EvaluationPlan:
    """How a run with evaluation.kind=private rates its models, see `EvaluationPlan`. `num_params`: of its model."""
    sizes = Sizes(num_params, query.length)
    settings, answers = round_settings(config, sizes), answers_of(config, query)
    if settings.user is None:
        return EvaluationPlan(config.evaluation, query, replace(settings, answers=answers), event=None)
    event = user_event(config, settings.user.noise_multiplier, joined=True, sizes=sizes)
    joined = replace(settings, answers=answers, user=replace(settings.user, event=event))
    return EvaluationPlan(config.evaluation, query, joined, evaluation_event(config, sizes))


def plan_of(config: RunConfig, *, num_params: int, chance_loss: float, query: Query | None = None) -> Plan:
    """The plan of a run. `query`: asked of models, if clients rate them."""
    return Plan(
        settings=round_settings(config, Sizes(num_params, 1 if query is None else query.length)),
        sampling=cohort_sampling(config),
        chance_loss=chance_loss,
        evaluation=None if query is None else evaluation_plan(config, query, num_params=num_params),
    )
