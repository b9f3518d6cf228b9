"""The audit of local privacy: the same release again and again, with one unit and with its opposite in its place.

Neighbours replace a unit, and everybody sees what a client sends: there is neither sampling nor a sum to hide in, so
one canary in many independent releases is the strongest test. It is as far from its opposite as the clip allows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from discreet.audit.canary_scores import Experiment, Facts
from discreet.audit.release_audit import LONG, Repeated, Score
from discreet.data.examples import Examples
from discreet.mechanisms.client_noise import LocalPrivacy, release_update
from discreet.mechanisms.local_noise import release_step, round_privacy
from discreet.privacy.randomness import RandomSource, secure_source
from discreet.server.plan import Plan
from discreet.settings.privacy import LOCAL
from discreet.settings.rules import ConfigError
from discreet.training.local_training import LocalSettings, settings_without_noise

COORDINATES = 8  # of what is released: more show no more, and cost time
EXAMPLES = 4  # of a client that takes one full-batch step


def audit_local(plan: Plan, *, releases: int, rounds: int = 1) -> Experiment:
    """Repeats the local mechanism of the first rounds of a run on a canary, and on its opposite.

    `gaussian`, `laplace`: the update is one long vector along one coordinate, or its negative. `laplace_step`: of a
    linear model's examples one has a long input, or its negative; the others are known.

    Raises:
      ConfigError: there is no local privacy, or there are fewer rounds, or fewer than two releases.
    """
    run = plan.run
    if LOCAL not in plan.mechanisms:
        raise ConfigError("privacy.local.kind must not be none: without noise there is no claim to audit")
    if not 1 <= rounds <= run.rounds:
        raise ConfigError(f"an audit needs 1 .. {run.rounds} rounds (got {rounds})")
    training = settings_without_noise(run.training)
    privacies = [round_privacy(run, round_number=number) for number in range(1, rounds + 1)]
    scored = [(privacy.event, _score(privacy, training)) for privacy in privacies]
    facts: Facts = {"kind": run.local.kind, "noise": run.noise}
    return Repeated("local level", LOCAL, scored, facts=facts).experiment(plan, releases)


def _score(privacy: LocalPrivacy, training: LocalSettings) -> Score:
    """The log-likelihood ratio of a release, but for a factor that is the same in each round, by an auditor who knows
    what either unit gives without noise."""
    still, power = replace(privacy, noise_multiplier=0.0), 2 if privacy.kind == "gaussian" else 1
    ours, theirs = (_released(still, training, included, secure_source()).double() for included in (1, 0))

    def score(included: int, source: RandomSource) -> float:
        released = _released(privacy, training, included, source).double()
        ratio = (released - theirs).abs() ** power - (released - ours).abs() ** power
        return float(ratio.sum()) / privacy.noise_multiplier**power

    return score


def _released(privacy: LocalPrivacy, training: LocalSettings, included: int, source: RandomSource) -> Tensor:
    far = LONG if included else -LONG
    if privacy.kind != "laplace_step":
        update = torch.zeros(COORDINATES)
        update[0] = far
        return release_update(update, privacy, source=source)
    model = nn.Linear(COORDINATES // 2, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # so that the gradients of the two units are opposite
    inputs = torch.zeros(EXAMPLES, COORDINATES // 2)
    inputs[0, 0] = far
    examples = Examples(inputs, torch.zeros(EXAMPLES, dtype=torch.int64))
    return release_step(model, examples, training=training, privacy=privacy, source=source)
