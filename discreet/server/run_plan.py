"""A round's public constants, the law of cohorts and how clients rate models, by the plan of a run."""

from __future__ import annotations

from discreet.evaluation.private_evaluation import EvaluationPlan
from discreet.mechanisms.mechanism import PlainSum, expected_cohort
from discreet.mechanisms.mechanism_table import own_noise
from discreet.mechanisms.sums import AnswerRelease
from discreet.queries.query import Query
from discreet.server.plan import Plan
from discreet.server.round import CohortSampling, RoundSettings


def cohort_sampling(plan: Plan) -> CohortSampling:
    """The sampling of a run's cohorts."""
    user = plan.run.user
    return CohortSampling(user.sampling, user.probability, user.population_size, user.groups)


def round_settings(plan: Plan, *, answers: AnswerRelease | None = None) -> RoundSettings:
    """A round's public constants. `answers`: how answers to a query are released, for rounds in which clients also rate
    the model."""
    return RoundSettings(expected_cohort(plan.run), plan.optimizer, plan.mechanism or PlainSum(), answers)


def statistics_noise(plan: Plan, length: int) -> AnswerRelease:
    """The release of the sum of all clients' answers of `length` numbers about their data."""
    population, noise = plan.run.user.population_size, plan.run.statistics.noise_multiplier
    return AnswerRelease(length, float(population), noise, plan.run.noise, population)


def answers_of(plan: Plan, query: Query) -> AnswerRelease:
    """The release of answers to a query: noised at the server, or by each client."""
    run, user = plan.run, plan.run.user
    return AnswerRelease(
        query.length,
        expected_cohort(run),
        run.evaluation.noise_multiplier,
        run.noise,
        user.population_size,
        user.probability,
        own_noise(run, query.l1_norm),
    )


def evaluation_plan(plan: Plan) -> EvaluationPlan | None:
    """The plan by which clients rate models; None if they do not."""
    if plan.query is None:
        return None
    event = None
    if plan.mechanism is not None:
        event = plan.mechanism.event(plan.mechanism.noise_multiplier, trains=False, rates=True)
    answers = answers_of(plan, plan.query)
    return EvaluationPlan(plan.run.evaluation, plan.query, answers, event)
