"""The choice of the experiment for an audit."""

from __future__ import annotations

from dataclasses import replace

from discreet.audit.canaries import Experiment
from discreet.audit.example_audit import audit_examples
from discreet.audit.release_audit import (
    audit_local,
    audit_round,
    audit_shared_step,
    audit_statistics,
)
from discreet.audit.user_audit import AuditRequest, audit_users
from discreet.mechanisms.mechanism import Mechanism
from discreet.mechanisms.mechanism_table import mechanisms_of, server_mechanism
from discreet.server.resolve import resolve
from discreet.settings.adjacency import EXAMPLE, LOCAL, USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.settings import Settings, client_settings

MOST_CANARIES = 500  # by default
RELEASES = 2000  # repetitions of one release, for each round and each neighbouring dataset
RATINGS = "evaluation"
STATISTICS = "statistics"


def experiment_of(config: Settings, asked: AuditRequest) -> Experiment:
    """Makes the plan and carries out the experiment. Raises ConfigError: these settings or options
    can't be audited."""
    run = client_settings(config)
    of = asked.of or next(iter(mechanisms_of(run)), USER)
    server = server_mechanism(run)
    user = config.privacy.user
    # Whole runs with canaries are needed if the clip norm adapts; an opened sum is audited alone.
    whole = server is None or not (run.masked or _is_clipped_once(run, server))
    if of not in (USER, RATINGS):  # a run that would not learn can still be audited
        user = replace(user, too_noisy="warn")
    if of != RATINGS and whole:  # all releases are discarded
        user = replace(user, account=None)
    plan, task = resolve(replace(config, privacy=replace(config.privacy, user=user)))
    half = run.user.population_size // 2
    most = min(MOST_CANARIES, plan.num_params)
    releases = asked.canaries or RELEASES
    if of == EXAMPLE and server is not None and server.guarantee == EXAMPLE:
        return audit_shared_step(plan, task, releases=releases)
    if of == EXAMPLE:
        return audit_examples(plan, task, canaries=asked.canaries or most, rounds=asked.rounds)
    if of == LOCAL:
        return audit_local(
            plan, releases=releases, rounds=1 if asked.rounds is None else asked.rounds
        )
    if of == STATISTICS:
        return audit_statistics(plan, task, releases=releases)
    if of == RATINGS or not whole:
        return audit_round(plan, releases=releases, of_answers=of == RATINGS)
    canaries = asked.canaries or min(half, most)
    return audit_users(plan, task, replace(asked, canaries=canaries))


def _is_clipped_once(run: ClientSettings, server: Mechanism) -> bool:
    """True if the clip norm never adapts to the updates."""
    made = server_mechanism(run.with_noise(server.guarantee, 1.0))
    return made is not None and made.expected_noise(1.0).clip_setting is not None
