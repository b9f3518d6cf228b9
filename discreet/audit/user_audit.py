"""The audit of user-level privacy: whole runs in which canary clients take part, each in or out by a secret coin.

Everything but the canaries is the run itself: its cohorts, its clipping, its noise, its ledger. The auditor sees every
release, the noised sum and the noised count of each round, and knows what the honest clients have sent, as the
adversary of the definition does (Nasr et al. 2021, arXiv 2101.04535; Andrew et al. 2023, arXiv 2302.03098).
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from discreet.audit.auditor import Auditor, Scores
from discreet.audit.canaries import Canaries, draw_canaries
from discreet.audit.canary_scores import CanaryScores, Claim, Experiment, Observation, Releases
from discreet.audit.verdict import outlook
from discreet.config import ConfigError, RunConfig
from discreet.federated.guarantees import USER, guarantees_of
from discreet.federated.messages import TRAIN, TrainReply, Work
from discreet.federated.partial_reply import PartialReply
from discreet.federated.round import UserPrivacy, empty_sum
from discreet.federated.run_plan import plan_of
from discreet.federated.session import checked, prepare
from discreet.federated.training_run import TrainingRun
from discreet.federated.transport import Failure, RoundReport, Transport
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.settings import client_settings
from discreet.simulation.in_process import virtual_clients

logger = logging.getLogger("discreet")

Reply = TrainReply | PartialReply | Failure


@dataclass(frozen=True)
class UserAudit:
    """What is put to the test.

    Attributes:
      canaries: how many canary clients a run has, at most the number of parameters.
      honest: how many other clients take part, the first ones of the run; None for all that there is room for.
      runs: how many runs, each with canaries of its own: more canaries than one run has room for.
    """

    canaries: int
    honest: int | None = None
    runs: int = 1


def audit_users(config: RunConfig, audit: UserAudit) -> Experiment:
    """Runs what `config` says with canaries, in a folder that is thrown away, and scores them.

    The canaries are members of the population: `population_size`, the sampling and the noise are those of `config`. A
    canary that is drawn into a cohort sends its direction, as long as the clip norm, and its bit; the server clips it
    as anybody's. If neighbours differ by adding or removing a client, a canary that is out is no member. If they differ
    by replacing one (cohorts of a fixed size), it is a member and sends the opposite of what it would send.

    Raises:
      ConfigError: the configuration can't run, gives no user-level guarantee, or has no room for the canaries.
    """
    _check(config, audit)
    resolved = checked(on_no_account(config))[0]
    releases = releases_of(resolved)
    logger.info("%s", outlook(releases, audit.canaries * audit.runs, rounds=resolved.rounds))
    seen = [_one_run(_numbered(resolved, number), audit) for number in range(audit.runs)]
    facts = {"canaries": audit.canaries, "runs": audit.runs, "honest clients": _honest(resolved, audit)}
    return Experiment("user level", observations_of(resolved, seen), {**facts, **facts_of(resolved, seen)}, releases)


def observations_of(resolved: RunConfig, seen: Sequence[SeenRun]) -> tuple[Observation, ...]:
    """What runs with different canaries have shown together: each round, then all of them, by their ledger."""
    included = np.concatenate([run.included for run in seen])
    rounds = [np.concatenate(scores) for scores in zip(*(run.rounds for run in seen), strict=True)]
    event = client_settings(resolved).user.event(_noise(resolved))
    claim = _claim(resolved, PrivacyLedger().record(event))
    centred = resolved.sampling.kind != "fixed"  # there a canary that is out sends the opposite
    named = [
        Observation(f"round {number + 1}", claim, CanaryScores(scores, included, centred))
        for number, scores in enumerate(rounds)
    ]
    whole = CanaryScores(np.sum(rounds, axis=0), included, centred)
    return (*named, Observation("run", _claim(resolved, seen[-1].spent), whole))


def on_no_account(config: RunConfig) -> RunConfig:
    """The configuration without the account of its population: what an audit releases is thrown away."""
    return replace(config, privacy=replace(config.privacy, user=replace(config.privacy.user, account=None)))


def _check(config: RunConfig, audit: UserAudit) -> None:
    check_noised(config)
    room = config.population_size - audit.canaries
    if audit.canaries < 1 or audit.runs < 1 or room < 0:
        raise ConfigError(
            f"an audit needs 1 .. {config.population_size} canaries, members of the population, and at least one run "
            f"(got {audit.canaries} and {audit.runs})"
        )
    most = min(room, config.data.num_clients)
    if audit.honest is not None and not 0 <= audit.honest <= most:
        raise ConfigError(
            f"beside {audit.canaries} canaries there is room for 0 .. {most} clients (got {audit.honest})"
        )


def check_noised(config: RunConfig) -> None:
    """Raises ConfigError unless there is a user-level guarantee."""
    if not config.privacy.user.enabled or config.privacy.user.noise_multiplier == 0:
        raise ConfigError("privacy.user.enabled must be true, with noise: without it there is no claim to audit")


def releases_of(config: RunConfig) -> Releases:
    """What the rounds of a configuration, whose noise is resolved, are planned to release and to cost."""
    spent = PrivacyLedger().record(client_settings(config).user.event(_noise(config)), config.rounds)
    claim = _claim(config, spent)
    probability = 1.0 if config.sampling.kind == "everyone" else config.sampling_probability
    return Releases(config.rounds, probability, _noise(config), claim.epsilon, claim.delta)


def _honest(config: RunConfig, audit: UserAudit) -> int:
    most = min(config.population_size - audit.canaries, config.data.num_clients)
    return most if audit.honest is None else audit.honest


def _noise(config: RunConfig) -> float:
    assert config.privacy.user.noise_multiplier is not None
    return config.privacy.user.noise_multiplier


def _numbered(config: RunConfig, number: int) -> RunConfig:
    return config if config.seed is None else replace(config, seed=config.seed + number)


def _claim(config: RunConfig, spent: PrivacyLedger) -> Claim:
    return Claim.of(config.privacy, spent, guarantees_of(config)[0].adjacency)


def facts_of(config: RunConfig, seen: Sequence[SeenRun]) -> dict[str, str | int | float | bool]:
    """What audit.json says of the settings of the runs."""
    return {
        "population_size": config.population_size,
        "sampling": f"{config.sampling.kind}, {config.sampling_probability:g}",
        "rounds": len(seen[-1].rounds),
        "noise_multiplier": _noise(config),
        "clip": config.privacy.user.clip.kind,
        "secure": config.seed is None,
    }


@dataclass(frozen=True, eq=False)
class SeenRun:
    """The scores of each round, (k,), how the coins fell, and what the ledger holds."""

    rounds: list[Scores]
    included: NDArray[np.bool_]
    spent: PrivacyLedger


def _one_run(config: RunConfig, audit: UserAudit) -> SeenRun:
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="discreet-audit-"))
        config = replace(config, output_dir=f"{folder}/run", resume=False, tracking="none")
        session = prepare(config, simulated=True, held=held, resolved=config)
        honest, start = _honest(config, audit), session.context
        num_params = start.state.params.numel()
        plan = plan_of(config, num_params=num_params, chance_loss=math.inf)
        assert plan.settings.user is not None
        canaries = draw_canaries(audit.canaries, num_params, start.source.child("canaries"))
        inner = virtual_clients(session, held) if honest else None
        replaced = config.sampling.kind == "fixed"
        transport = CanaryTransport(inner, canaries, honest=honest, user=plan.settings.user, replaced=replaced)
        auditor = Auditor(plan.settings, canaries, lambda: transport.others, start.state)
        run = TrainingRun(start, plan, transport=transport, evaluate=auditor.evaluate, also=auditor.row)
        run.run()
        return SeenRun(auditor.rounds, canaries.included, start.ledger.spent(USER))


class CanaryTransport:
    """Asks honest clients by another transport, and answers for the canaries.

    Clients 0 .. honest - 1 are those of `inner`; after them come the canaries. What honest clients sent in a round is
    added up in `others`, as the auditor knows it.

    Args:
      inner: None if no honest client takes part.
      replaced: whether a canary that is out sends the opposite instead of being no member.
    """

    def __init__(
        self, inner: Transport | None, canaries: Canaries, *, honest: int, user: UserPrivacy, replaced: bool = False
    ) -> None:
        self.inner, self.canaries, self.honest = inner, canaries, honest
        self.user, self.replaced = user, replaced
        self.others = empty_sum(len(canaries.signs), 1.0, user)

    def members(self) -> Sequence[int]:
        """The honest clients, and the canaries that are in; all canaries if they are replaced."""
        there = np.ones_like(self.canaries.included) if self.replaced else self.canaries.included
        return [*range(self.honest), *(self.honest + np.flatnonzero(there)).tolist()]

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int], work: Work = TRAIN
    ) -> Iterator[Reply]:
        """Replies of the honest clients of a cohort, then of its canaries."""
        self.others = empty_sum(params.numel(), clip_norm, self.user)
        asked = [client for client in cohort if client < self.honest]
        if self.inner is not None:
            replies = self.inner.ask(
                round_number=round_number, params=params, clip_norm=clip_norm, cohort=asked, work=work
            )
            yield from self._known(replies)
        for client in cohort:
            if client >= self.honest:
                yield self._canary(client, round_number, clip_norm)

    def _known(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            for part in RoundReport().accept([reply]):
                self.others.take(part)
            yield reply

    def _canary(self, client: int, round_number: int, clip_norm: float) -> TrainReply:
        index = client - self.honest
        opposite = self.replaced and not self.canaries.included[index]
        update = self.canaries.direction(index) * (-clip_norm if opposite else clip_norm)
        return TrainReply(round_number, update.float(), bool(self.canaries.bits[index]) != opposite, client=client)
