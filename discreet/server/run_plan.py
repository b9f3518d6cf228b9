"""A round's public constants, the law of cohorts and how clients rate models, by the plan of a run."""

from __future__ import annotations

from dataclasses import replace

from discreet.evaluation.private_evaluation import EvaluationPlan
from discreet.mechanisms.mechanism import PlainSum, expected_cohort
from discreet.mechanisms.mechanism_table import own_noise
from discreet.mechanisms.sums import AnswerRelease
from discreet.queries.query import Query
from discreet.server.plan import Plan
from discreet.server.round import CohortSampling, RoundSettings
from discreet.settings.privacy import PRIVACY_DRAWS


def cohort_sampling(plan: Plan) -> CohortSampling:
    """The sampling of a run's cohorts."""
    user = plan.run.user
    return CohortSampling(user.sampling, user.probability, user.population_size, user.groups)


def round_settings(plan: Plan, *, answers: AnswerRelease | None = None) -> RoundSettings:
    """A round's public constants. `answers`: how answers to a query are released, for rounds in which clients also rate
    the model."""
    return RoundSettings(expected_cohort(plan.run), plan.optimizer, plan.mechanism or PlainSum(), answers)


def server_noise(plan: Plan, length: int, *, expected_cohort: float, noise_multiplier: float) -> AnswerRelease:
    """The noise of a run's server on a sum of answers of so many numbers: on the grid, in float or by secure sum, as on
    updates."""
    return AnswerRelease(
        length,
        expected_cohort,
        noise_multiplier,
        draws=PRIVACY_DRAWS.get(plan.run.noise, 1),
        on_grid=plan.run.noise == "grid",
        largest_cohort=plan.run.user.population_size,
    )


def statistics_noise(plan: Plan, length: int) -> AnswerRelease:
    """The release of the sum of all clients' answers of `length` numbers about their data."""
    everybody = float(plan.run.user.population_size)
    return server_noise(plan, length, expected_cohort=everybody, noise_multiplier=plan.run.statistics.noise_multiplier)


def answers_of(plan: Plan, query: Query) -> AnswerRelease:
    """The release of answers to a query: noised at the server, or by each client."""
    run, own = plan.run, own_noise(plan.run, query.l1_norm)
    noise = server_noise(
        plan, query.length, expected_cohort=expected_cohort(run), noise_multiplier=run.evaluation.noise_multiplier
    )
    return replace(noise, probability=run.user.probability, own=own, on_grid=noise.on_grid and own is None)


def evaluation_plan(plan: Plan) -> EvaluationPlan | None:
    """The plan by which clients rate models; None if they do not."""
    if plan.query is None:
        return None
    event = None
    if plan.mechanism is not None:
        event = plan.mechanism.event(plan.mechanism.noise_multiplier, trains=False, rates=True)
    answers = answers_of(plan, plan.query)
    return EvaluationPlan(plan.run.evaluation, plan.query, answers, event)
