"""The audit of example-level privacy: DP-SGD of one client, some of whose examples are canaries by
a secret coin.

The batches, the clipping, the sum and the noise are those of the client. A canary is an example
whose gradient is its direction, far longer than the clip norm: the worst case for any model (the
"Dirac canary" of Nasr et al. 2023, arXiv 2302.07956). The auditor sees the noised gradient of each
step, and knows the other examples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.audit.canaries import (
    Canaries,
    Claim,
    Experiment,
    Facts,
    Releases,
    Scores,
    draw_canaries,
    observed,
)
from discreet.data.examples import Examples, Task
from discreet.data.partition import client_examples_of
from discreet.mechanisms.local_dp_sgd import local_settings
from discreet.models.fixed_part import behind_fixed
from discreet.models.models import masks_from, model_for, to_train
from discreet.per_example.objective import trainable
from discreet.planning.plan import Plan
from discreet.privacy.clipping import clip_by_norm
from discreet.privacy.randomness import source_of
from discreet.settings.adjacency import EXAMPLE
from discreet.settings.rules import ConfigError
from discreet.training.local_training import (
    OneClient,
    dp_sgd,
    example_event,
    sampling_probability,
    steps_of,
)
from discreet.training.units import Drawn, units_of

NO_CLAIM = "privacy.example.enabled must be true, with noise: without it there is no claim to audit"
LONG = 10.0  # the length of a canary's gradient, in clip norms


def audit_examples(
    plan: Plan, task: Task, *, canaries: int, rounds: int | None = None
) -> Experiment:
    """Trains client 0 by DP-SGD as a run does, with canaries among its examples, and scores them.

    The client keeps its number of examples: its last ones become canaries. A canary that is out
    contributes nothing, as in zero-out adjacency; with `data.public_num_examples` it is absent.

    Args:
      canaries: at most the number of parameters.
      rounds: the number of rounds in which the client takes part; None for all planned rounds.

    Raises:
      ConfigError: there is no example-level guarantee, or the client has too few examples.
    """
    if not plan.noised(EXAMPLE):
        raise ConfigError(NO_CLAIM)
    model, examples = model_and_examples(plan, task)
    count = len(units_of(examples, plan.run.example.most_rows))
    if not 1 <= canaries <= count:
        raise ConfigError(
            f"--canaries must be within 1 .. {count}, the examples of client 0 (got {canaries})"
        )
    if rounds is None:
        rounds = plan.run.rounds
    settings = local_settings(plan.run, count)
    source = source_of(plan.seed).child("audit")
    assert settings.example is not None
    noise = settings.example.noise_multiplier
    size = sum(parameter.numel() for parameter in trainable(model))
    drawn = draw_canaries(canaries, size, source.child("canaries"))
    clients = (
        OneClient(model, examples, settings, source.child("round", number))
        for number in range(rounds)
    )
    seen = [_scores_of(client, drawn, noise) for client in clients]
    event = example_event(count, settings)
    steps = steps_of(count, settings)
    total = steps * len(seen)
    once = Claim.of(plan, EXAMPLE, PrivacyLedger().record(event, steps))
    claim = Claim.of(plan, EXAMPLE, PrivacyLedger().record(event, total))
    releases = Releases(total, sampling_probability(count, settings), noise, claim)
    facts: Facts = {
        "canaries": canaries,
        f"{plan.run.example.unit_name}s": count,
        "rounds": len(seen),
        "steps": total,
        "batch_size": settings.batch_size,
        "noise_multiplier": noise,
        "secure": plan.seed is None,
    }
    rounds_seen = observed([(once, scores) for scores in seen], claim)
    return Experiment("example level", rounds_seen, facts, releases)


def model_and_examples(plan: Plan, task: Task) -> tuple[nn.Module, Examples]:
    """The model before the first round, and the examples of client 0 after the frozen part of the
    model."""
    examples = task.train.subset(
        torch.from_numpy(client_examples_of(task, plan.run.data).examples(0))
    )
    return behind_fixed(model_for(plan.model, task.shape, seed=0), examples)


def _scores_of(client: OneClient, canaries: Canaries, noise_multiplier: float) -> Scores:
    """The scores of one round, added up over its steps. The last k units of the client are replaced
    by canaries; its model is trained."""
    ordinary = len(client.units) - len(canaries.rows)
    places = np.arange(len(canaries.rows))
    if client.settings.example and client.settings.example.public_num_examples is not None:
        places = places[canaries.included]  # the others are absent
        client = replace(client, examples=client.units.first(ordinary + len(places)))
    steps = ScoredSteps(client, canaries, places, noise_multiplier)
    to_train(client.model)
    rows = [parameter.detach().unsqueeze(0) for parameter in trainable(client.model)]
    with masks_from(client.source, client.model):
        dp_sgd(steps, rows, [len(client.units)], client.settings)
    return Scores(steps.scores, canaries.included, centred=True)


class ScoredSteps:
    """`DpSgdClients` for one client whose last units are canaries, which are scored by each step's
    noised sum. `places` are the numbers of the canaries at the last units. A score is the inner
    product with the noised sum, minus the other examples, over the variance of the noise."""

    def __init__(
        self, client: OneClient, canaries: Canaries, places: np.ndarray, noise_multiplier: float
    ) -> None:
        self.client = client
        self.canaries = canaries
        self.places = places
        self.poisson_batch = client.poisson_batch
        self.views = client.views
        self.noise_multiplier = noise_multiplier
        self.known = torch.zeros(len(canaries.signs), dtype=torch.float64)
        self.scores = np.zeros(len(canaries.rows))

    def clipped_sums(self, params: list[Tensor], batch: Drawn, clip_norm: float) -> Tensor:
        """The sum of the batch's clipped gradients; those of canaries are their directions."""
        ordinary = len(self.client.units) - len(self.places)
        is_ordinary = batch.units < ordinary
        sums = self.client.clipped_sums(params, batch.only(is_ordinary), clip_norm)
        self.known = sums[0].to(torch.float64, copy=True)
        drawn = self.places[np.unique(batch.units[~is_ordinary].numpy()) - ordinary]
        for number in drawn[self.canaries.included[drawn]].tolist():
            gradient = LONG * clip_norm * self.canaries.direction(number)
            sums += clip_by_norm(gradient.float().unsqueeze(0), clip_norm)[0]
        return sums

    def add_noise(self, sums: Tensor, clip_norm: float, *, step: int) -> Tensor:
        """The client's noised sum; the canaries are scored by it."""
        noised = self.client.add_noise(sums, clip_norm, step=step)
        variance = clip_norm * self.noise_multiplier**2
        self.scores = self.scores + self.canaries.along(noised[0].double() - self.known) / variance
        return noised
