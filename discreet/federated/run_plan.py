"""From settings to the plan of a run: how cohorts are drawn, and a round's public constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from discreet.client_settings import PRIVACY_DRAWS
from discreet.config import RunConfig
from discreet.federated.answer_sum import AnswerNoise, NoisedByClients, server_noise
from discreet.federated.guarantees import count_stddev, evaluation_event, expected_cohort, user_event
from discreet.federated.opened_run import OpenedRun
from discreet.federated.private_evaluation import EvaluationPlan
from discreet.federated.query import Query
from discreet.federated.round import CohortSampling, RoundSettings, UserPrivacy
from discreet.federated.sealed_sum import SealedTransport
from discreet.federated.server_optimizer import server_optimizer
from discreet.federated.session import Session
from discreet.federated.training_plan import OnRound, Plan, tell_nobody
from discreet.federated.training_run import TrainingRun
from discreet.federated.transport import Transport
from discreet.secure_settings import PLANNED, Sizes
from discreet.settings import client_settings
from discreet.training.losses import chance_loss


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


def plan_of(
    run: OpenedRun,
    *,
    chance_loss: float,
    query: Query | None = None,
    says: Callable[[str], str] = str,
    also: OnRound = tell_nobody,
) -> Plan:
    """The plan of a run whose folder is open: see `Plan`. `query`: what clients are asked of models, if anything."""
    config, num_params = run.config, run.checkpoint.params.numel()
    return Plan(
        rounds=config.rounds,
        settings=round_settings(config, Sizes(num_params, 1 if query is None else query.length)),
        sampling=cohort_sampling(config),
        source=run.source,
        privacy=config.privacy,
        chance_loss=chance_loss,
        evaluation=None if query is None else evaluation_plan(config, query, num_params=num_params),
        says=says,
        also=also,
    )


def training_run(
    session: Session, transport: Transport | SealedTransport, *, on_round: OnRound = tell_nobody
) -> TrainingRun:
    """The rounds of a run that is ready to start, with the clients that `transport` asks."""
    chance = chance_loss(session.config.task, session.task)
    plan = plan_of(session.opened, chance_loss=chance, query=session.query, also=on_round)
    evaluate = session.evaluation()
    return TrainingRun(
        plan,
        session.folder,
        ledger=session.opened.ledger,
        transport=transport,
        evaluate=lambda after: evaluate(after.params),
    )
