"""The audit of user-level privacy: whole runs in which canary clients take part, each in or out by
a secret coin.

Everything except the canaries is part of the real run: cohorts, clipping, noise, ledger. The
auditor sees every release, the noised sum and the noised count of each round, and knows what the
honest clients have sent, like the adversary of the definition (Nasr et al. 2021, arXiv 2101.04535;
Andrew et al. 2023, arXiv 2302.03098).
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from dp_accounting import DpEvent
from scipy.linalg import toeplitz
from torch import Tensor

from discreet.accounting.correlation import Turns
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.audit.canaries import (
    Auditor,
    Canaries,
    Claim,
    Experiment,
    Facts,
    Releases,
    Scores,
    draw_canaries,
    noised_sum,
    observed,
)
from discreet.audit.verdict import outlook
from discreet.data.examples import Task
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.central_gaussian import noise_of
from discreet.mechanisms.mechanism import Mechanism
from discreet.mechanisms.round_state import RoundStart
from discreet.mechanisms.sums import PartialReply, UsableReply
from discreet.planning.plan import Plan
from discreet.planning.state import State
from discreet.privacy.sampling import in_turn
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.run_files.call import Call
from discreet.run_files.metrics_table import unrated
from discreet.run_files.run_folder import RunFolder
from discreet.server.session import open_session
from discreet.server.training_run import TrainingRun
from discreet.server.transport import Reply, ReplyStats, Transport
from discreet.settings.adjacency import USER
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import virtual_clients

logger = logging.getLogger("discreet")

# The scores of each round of a run, and its ledger.
SeenRun = tuple[Sequence[Scores], PrivacyLedger]


@dataclass(frozen=True)
class AuditRequest:
    """The options of `discreet audit`; None is a default that depends on the kind of audit."""

    of: str | None = None
    canaries: int | None = None
    rounds: int | None = None
    runs: int = 1
    honest: int | None = None
    device: str = "cpu"


def audit_users(plan: Plan, task: Task, asked: AuditRequest) -> Experiment:
    """Runs a plan with canaries, in a temporary folder, and scores them.

    The canaries are members of the population: `population_size`, the sampling and the noise are
    those of the plan. A canary that is drawn into a cohort sends its direction, as long as the clip
    norm, and its bit; the server clips it like any other update. If adjacency adds or removes a
    client, a canary that is out is not a member. If it replaces a client (cohorts of a fixed size),
    the canary is a member and sends the opposite.

    `asked.canaries`, in each of the `asked.runs`, are at most the number of parameters.
    `asked.honest` is the number of other clients that take part, the first ones of the run; None:
    as many as fit.

    Raises:
      ConfigError: the configuration can't run, gives no user-level guarantee, or has no room for
        the canaries.
    """
    check_noised(plan)
    canaries = asked.canaries or 0
    honest = asked.honest
    runs = asked.runs
    population = plan.run.user.population_size
    if not 1 <= canaries <= population or runs < 1:
        raise ConfigError(
            f"--canaries must be within 1 .. {population}, members of the population, and --runs "
            f"at least 1 (got {canaries} and {runs})"
        )
    most = min(population - canaries, plan.run.data.num_clients)
    if honest is None:
        honest = most
    if not 0 <= honest <= most:
        raise ConfigError(
            f"--honest must be within 0 .. {most}: so many clients there are beside {canaries} "
            f"canaries (got {honest})"
        )
    releases = power_of(plan, canaries * runs)
    seeds = [None if plan.seed is None else plan.seed + number for number in range(runs)]
    plans = [plan.changed(seed=seed) for seed in seeds]
    seen = [_one_run(each, task, canaries, honest, asked.device) for each in plans]
    facts: Facts = {"canaries": canaries, "runs": runs, "honest clients": honest}
    return together("user level", plan, releases, seen, facts)


def check_noised(plan: Plan) -> None:
    """Raises ConfigError unless there is a user-level guarantee."""
    if not plan.noised(USER):
        raise ConfigError(
            "privacy.user.enabled must be true, with noise: without it there is no claim to audit"
        )


def power_of(plan: Plan, canaries: int) -> Releases:
    """The planned releases of a run; logs the smallest fault that `canaries` of all runs can
    find."""
    user = plan.mechanism
    rounds = plan.run.rounds
    spent = PrivacyLedger(tuple((event_of(user, number), 1) for number in range(1, rounds + 1)))
    claim = Claim.of(plan, USER, spent)
    noise = noise_of(plan.run)
    turns = user.participation.turns
    releases = Releases(rounds, plan.run.user.probability, noise, claim)
    alone = rounds
    if turns is not None:  # all rounds are one observation; no round is judged alone
        releases = Releases(1, 1.0, noise / turns.sensitivity, claim)
        alone = 0
    logger.info("%s", outlook(releases, canaries, rounds=alone))
    return releases


def together(
    mechanism: str, plan: Plan, releases: Releases, seen: Sequence[SeenRun], facts: Facts
) -> Experiment:
    """The findings of runs with different canaries: each round, then all together, with the claim
    of their ledger."""
    user = plan.mechanism
    rounds = []
    one = PrivacyLedger().record(event_of(user, 1))
    claim, run_claim = (Claim.of(plan, USER, each) for each in (one, seen[-1][1]))
    for same in zip(*(scores for scores, _ in seen), strict=True):
        values, included = (
            np.concatenate([getattr(each, name) for each in same])
            for name in ("values", "included")
        )
        rounds.append((claim, Scores(values, included, same[0].centred)))
    more: Facts = {
        "population_size": plan.run.user.population_size,
        "sampling": f"{plan.run.user.sampling}, {plan.run.user.probability:g}",
        "rounds": len(rounds),
        "noise_multiplier": noise_of(plan.run),
        "clip": plan.clip.kind,
        "secure": plan.seed is None,
    }
    found = observed(rounds, run_claim)
    if user.participation.turns is not None:
        found = found[-1:]
    return Experiment(mechanism, found, {**facts, **more}, releases)


def event_of(mechanism: Mechanism, number: int) -> DpEvent:
    """The event that a round charges to the server's ledger, at user level."""
    event = mechanism.event(number)
    assert event is not None
    return event


def _joined(plan: Plan, turns: Turns, rounds: Sequence[Scores], first: int) -> Scores:
    """The scores of canaries, whose numbers begin with `first`, by all rounds together. Multiplying
    by C makes the noise of the rounds independent; a canary's contributions to all rounds are
    scored at once."""
    noise = plan.mechanism.expected_noise(plan.first_clip_norm).multiplier
    values = np.stack([each.values for each in rounds]) * noise**2
    canaries = range(len(rounds[0].values))
    asked = [
        [in_turn(first + each, at + 1, groups=turns.groups) for each in canaries]
        for at in range(len(rounds))
    ]
    factor = toeplitz(turns.factor[: len(rounds)], np.zeros(len(rounds)))
    added = factor @ np.array(asked, dtype=float)
    seen = (added * (factor @ values)).sum(0) / np.linalg.norm(added, axis=0).clip(min=1.0)
    return replace(rounds[0], values=seen / noise_of(plan.run) ** 2)


def _one_run(plan: Plan, task: Task, count: int, honest: int, device: str) -> SeenRun:
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="discreet-audit-"))
        # Clients do not evaluate the model, as the canaries would have no answer.
        plan = replace(plan, query=None, chance_loss=math.inf)
        call = Call(f"{folder}/run", device=device)
        session = open_session(plan, task, call, simulated=True, held=held)
        context = session.context
        turns = plan.mechanism.participation.turns
        canaries = draw_canaries(count, plan.num_params, context.source.child("canaries"))
        if honest:
            inner = virtual_clients(session, held)
        else:
            inner = None
        replaced = plan.run.user.sampling == "fixed"
        transport = CanaryTransport(
            inner, canaries, honest=honest, user=plan.mechanism, replaced=replaced
        )
        states = [context.state]
        known = list[PartialReply]()

        def look(_: Mapping[str, object]) -> None:
            states.extend(filter(None, [context.folder.load_checkpoint()]))
            known.append(transport.part())

        TrainingRun(
            context, transport=transport, evaluate=lambda *_: unrated(), on_round=look
        ).run()
        rounds, spent = scored(plan, context.folder, states, canaries, known)
        rounds = [replace(each, centred=not replaced) for each in rounds]
        return rounds if turns is None else [_joined(plan, turns, rounds, honest)], spent


def scored(
    plan: Plan,
    run: RunFolder,
    states: Sequence[State],
    canaries: Canaries,
    known: Sequence[PartialReply | None] = (),
) -> SeenRun:
    """Scores canaries by a run folder and the states before the first round and after each.
    `known`: the sums of others in each round; empty if there are none."""
    auditor = Auditor(plan, canaries)
    rows = run.read_metrics()
    found = list[Scores]()
    for (before, after), row, others in zip(
        pairwise(states), rows, known or [None] * len(rows), strict=True
    ):
        sums, below = (others.in_floats, others.below) if others else (0.0, 0)
        total = noised_sum(plan, before, after)
        values = auditor.scores(
            total, before.clip_norm, row["fraction_below"], known=sums, below=below
        )
        found.append(Scores(values, canaries.included, centred=True))
    return found, DurableLedger(run.ledger_path).spent(USER)


class CanaryTransport:
    """Asks honest clients by another transport, and answers for the canaries. Clients 0 .. honest -
    1 are those of `inner`; the canaries follow. The replies of honest clients in a round are added
    up, as the auditor knows them. `replaced`: a canary that is out sends the opposite instead of
    not being a member."""

    def __init__(
        self,
        inner: Transport | None,
        canaries: Canaries,
        *,
        honest: int,
        user: Mechanism,
        replaced: bool = False,
    ) -> None:
        self.inner = inner
        self.canaries = canaries
        self.honest = honest
        self.user = user
        self.replaced = replaced
        self.start = RoundStart(0, torch.zeros(len(canaries.signs)), 1.0)
        self.others = list[UsableReply]()

    def part(self) -> PartialReply:
        """The sum of what honest clients sent in the last round."""
        part: PartialReply = self.user.add_up(self.others, self.start).part()
        return part

    def available_clients(self) -> Sequence[int]:
        """The honest clients, and the canaries that are in; all canaries if they are replaced."""
        if self.replaced:
            there = np.ones_like(self.canaries.included)
        else:
            there = self.canaries.included
        return [*range(self.honest), *(self.honest + np.flatnonzero(there)).tolist()]

    def ask(self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]) -> Iterator[Reply]:
        """Replies of the honest clients of a cohort, then of its canaries."""
        self.start = RoundStart(asked.round - 1, params, asked.clip_norm)
        self.others = []
        if self.inner is not None:
            honest = [client for client in cohort if client < self.honest]
            for reply in self.inner.ask(asked, params, honest):
                counted = ReplyStats().count(reply)
                if counted is not None:
                    self.others = [self.user.add_up([*self.others, counted], self.start).part()]
                yield reply
        for client in cohort:
            if client >= self.honest:
                yield self._canary(client, asked.round, asked.clip_norm)

    def _canary(self, client: int, round_number: int, clip_norm: float) -> TrainReply:
        index = client - self.honest
        opposite = self.replaced and not self.canaries.included[index]
        update = self.canaries.direction(index) * (-clip_norm if opposite else clip_norm)
        return TrainReply(
            round_number, update.float(), bool(self.canaries.bits[index]) != opposite, client=client
        )
