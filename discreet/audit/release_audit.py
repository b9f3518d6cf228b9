"""The audit of any mechanism that noises at the server: one round is released again and again, with the canary's reply
and without it."""

from __future__ import annotations

import torch

from discreet.audit.answer_audit import sampled
from discreet.audit.canaries import draw_canaries, noised_sum
from discreet.audit.canary_scores import Experiment, Facts
from discreet.audit.repeated_release import Release
from discreet.audit.user_audit import check_noised
from discreet.privacy.randomness import RandomSource, source_of
from discreet.protocol.messages import TrainReply
from discreet.server.round import dp_fedavg_round
from discreet.server.run_plan import cohort_sampling, round_settings
from discreet.server.session import resolve
from discreet.server.state import initial_state
from discreet.settings.settings import Settings

LONG = 1e4  # times the clip norm


def audit_release(config: Settings, *, releases: int) -> Experiment:
    """Repeats the first round of a run in which nobody but the canary replies, and scores it by the part of the release
    along what the canary adds.

    Raises:
      ConfigError: there is no guarantee with noise at user level, or there are fewer than two releases.
    """
    plan, _ = resolve(config)
    check_noised(plan)
    settings, nothing = round_settings(plan), torch.zeros(plan.num_params)
    start = initial_state(nothing, clip_norm=plan.first_clip_norm)
    canaries = draw_canaries(1, plan.num_params, source_of(plan.seed).child("audit").child("direction"))
    update = LONG * start.clip_norm * canaries.direction(0).float()
    total = settings.release.empty(plan.num_params, start.clip_norm)
    total.take(TrainReply(1, update, below=False))
    part = total.part()
    added = part.values.double() * (1.0 if part.grid is None else part.grid.step)

    def score(sent: int, source: RandomSource) -> float:
        replies = [TrainReply(1, sent * update, below=False)] if sent else []
        after, _ = dp_fedavg_round(start, replies, settings, source=source, charge=lambda _: None)
        return float(noised_sum(settings, start, after) @ added) / float(added.square().sum())

    event, paid = settings.release.event, plan.guarantees[0].adjacency
    assert event is not None
    facts: Facts = {"noise_multiplier": settings.release.sum_noise}
    release = Release("one round of the mechanism", event, paid, score, facts)
    return sampled(plan, cohort_sampling(plan), release, releases)
