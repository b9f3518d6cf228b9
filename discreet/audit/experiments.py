"""The experiment that fits what is to be audited."""

from __future__ import annotations

from dataclasses import dataclass

from discreet.audit.answer_audit import audit_answers, audit_statistics
from discreet.audit.canary_scores import Experiment
from discreet.audit.example_audit import audit_examples
from discreet.audit.federation_audit import audit_federation
from discreet.audit.local_audit import audit_local
from discreet.audit.masked_audit import audit_secure, audit_shared_step
from discreet.audit.release_audit import audit_release
from discreet.audit.user_audit import audit_users
from discreet.server.plan import planned
from discreet.settings.privacy import EXAMPLE, LOCAL, USER
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings

MOST_CANARIES = 500  # unless more are asked for
NODES = 40  # canaries of each run in a federation
RELEASES = 2000  # of each round and of either neighbour, where one release is repeated


@dataclass(frozen=True)
class Asked:
    """The options of `discreet audit`; None is a default that depends on what is audited."""

    of: str | None = None
    federation: bool = False
    canaries: int | None = None
    rounds: int | None = None
    client: int = 0
    runs: int = 1
    honest: int | None = None


def experiment_of(config: Settings, asked: Asked) -> Experiment:
    """Carries out the experiment.

    Raises:
      ConfigError: it can't be audited with these settings or options.
    """
    half, releases = config.population_size // 2, asked.canaries or RELEASES
    if asked.federation:
        if asked.of not in (None, USER) or asked.honest:
            raise ConfigError("--federation audits the user level, with canaries alone: leave out --of and --honest")
        return audit_federation(config, canaries=asked.canaries or min(half, NODES), runs=asked.runs)
    plan = planned(config)
    of = asked.of or next((each.name for each in plan.guarantees if each.enabled), USER)
    masked = any(each.masked for each in plan.mechanisms.values())
    if of == EXAMPLE and masked:
        return audit_shared_step(config, releases=releases, client=asked.client)
    if of == EXAMPLE:
        canaries = asked.canaries or MOST_CANARIES
        return audit_examples(config, canaries=canaries, client=asked.client, rounds=asked.rounds)
    if of == LOCAL:
        return audit_local(config, releases=releases, rounds=1 if asked.rounds is None else asked.rounds)
    if of == "statistics":
        return audit_statistics(config, releases=releases)
    if masked:
        return audit_secure(config, releases=releases, of_answers=of == "evaluation")
    if of == "evaluation":
        return audit_answers(config, releases=releases)
    if plan.mechanism is not None and plan.mechanism.fixed_norm is not None:  # canaries follow a clip norm that moves
        return audit_release(config, releases=releases)
    canaries = asked.canaries or min(half, MOST_CANARIES)
    return audit_users(config, canaries=canaries, honest=asked.honest, runs=asked.runs)
