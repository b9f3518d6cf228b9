"""The audit of example-level privacy: DP-SGD of one client, some of whose examples are canaries by a secret coin.

The batches, the clipping, the sum and the noise are those of the client. A canary is an example whose gradient is its
direction, far longer than the clip: the worst that an example can be, whatever the model (the "Dirac canary" of Nasr et
al. 2023, arXiv 2302.07956). The auditor sees the noised gradient of each step, and knows the other examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.audit.canaries import Canaries, draw_canaries
from discreet.audit.canary_scores import CanaryScores, Claim, Experiment, Observation, Releases
from discreet.client.admission import local_settings
from discreet.client_settings import ADD_OR_REMOVE, ZERO_OUT, ConfigError
from discreet.config import RunConfig
from discreet.privacy.clipping import clip_by_norm
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.randomness import source_of
from discreet.settings import client_settings
from discreet.simulation.client_examples import client_examples_of
from discreet.tasks.datasets import load_task
from discreet.tasks.dropout import masks_from
from discreet.tasks.examples import Examples
from discreet.tasks.models import model_for, to_train, trainable
from discreet.tasks.scattering import features_of, split_fixed
from discreet.training.local_training import (
    LocalSettings,
    OneClient,
    dp_sgd,
    example_event,
    sampling_probability,
    steps_of,
)

LONG = 10.0  # times the clip: the length of a canary's gradient


@dataclass(frozen=True)
class ExampleAudit:
    """What is put to the test.

    Attributes:
      canaries: how many of the client's examples are canaries, at most the number of parameters.
      client: whose examples they are.
      rounds: in how many rounds the client takes part; None for all that are planned.
    """

    canaries: int
    client: int = 0
    rounds: int | None = None


def audit_examples(config: RunConfig, audit: ExampleAudit) -> Experiment:
    """Trains a client by DP-SGD as `config` says, with canaries among its examples, and scores them.

    The client keeps its number of examples: its last ones become canaries. A canary that is out contributes nothing, as
    zero-out neighbours have it; with `data.public_num_examples` it is not there at all.

    Raises:
      ConfigError: there is no example-level guarantee, or the client has too few examples.
    """
    if not config.privacy.example.enabled or config.privacy.example.noise_multiplier == 0:
        raise ConfigError("privacy.example.enabled must be true, with noise: without it there is no claim to audit")
    assert not config.privacy.example.secure, "discreet.audit.step_audit opens the sum of a step that clients share"
    task = load_task(config.data.name, path=config.data.path)
    fixed, model = split_fixed(model_for(config.model.name, task.shape, seed=0))
    rows = torch.from_numpy(client_examples_of(task, config.data).examples(audit.client))
    examples = Examples(task.train.inputs[rows], task.train.targets[rows])
    if fixed is not None:
        examples = features_of(fixed, examples)
    if not 1 <= audit.canaries <= len(examples):
        raise ConfigError(f"client {audit.client} has room for 1 .. {len(examples)} canaries (got {audit.canaries})")
    settings = local_settings(client_settings(config), len(examples))
    source = source_of(config.seed).child("audit")
    rounds = config.rounds if audit.rounds is None else audit.rounds
    canaries = draw_canaries(audit.canaries, sum(p.numel() for p in trainable(model)), source.child("canaries"))
    scores = [
        score_round(OneClient(model, examples, settings, source.child("round", number)), canaries)
        for number in range(rounds)
    ]
    return _experiment(config, settings, len(examples), scores=scores, included=canaries.included)


def _experiment(
    config: RunConfig,
    settings: LocalSettings,
    count: int,
    *,
    scores: Sequence[NDArray[np.float64]],
    included: NDArray[np.bool_],
) -> Experiment:
    assert settings.example is not None
    steps, event = steps_of(count, settings), example_event(count, settings)
    adjacency = ZERO_OUT if settings.example.public_num_examples is None else ADD_OR_REMOVE

    def seen(name: str, releases: int, values: NDArray[np.float64]) -> Observation:
        claim = Claim.of(config.privacy, PrivacyLedger().record(event, releases), adjacency)
        return Observation(name, claim, CanaryScores(values, included, centred=True))

    rounds = [seen(f"round {number + 1}", steps, values) for number, values in enumerate(scores)]
    run = seen("run", steps * len(scores), np.sum(scores, axis=0))
    releases = Releases(
        *(steps * len(scores), sampling_probability(count, settings), settings.example.noise_multiplier),
        *(run.claim.epsilon, run.claim.delta),
    )
    facts: dict[str, str | int | float | bool] = {
        "canaries": len(included),
        "examples": count,
        "rounds": len(scores),
        "steps": steps * len(scores),
        "batch_size": settings.batch_size,
        "noise_multiplier": settings.example.noise_multiplier,
        "secure": config.seed is None,
    }
    return Experiment("example level", (*rounds, run), facts, releases)


def score_round(client: OneClient, canaries: Canaries) -> NDArray[np.float64]:
    """The scores of one round's steps, (k,): inner products over the variance of the noise, added up.

    The last k examples of the client are the places of the canaries; its model is moved.
    """
    assert client.settings.example is not None
    ordinary = len(client.examples) - len(canaries.rows)
    if client.settings.example.public_num_examples is not None:
        there = ordinary + int(canaries.included.sum())
        client = replace(client, examples=Examples(client.examples.inputs[:there], client.examples.targets[:there]))
    steps = ScoredSteps(client, canaries, ordinary)
    to_train(client.model)
    rows = [parameter.detach().unsqueeze(0) for parameter in trainable(client.model)]
    with masks_from(client.source, client.model):
        dp_sgd(steps, rows, [len(client.examples)], client.settings)
    return steps.scores


class ScoredSteps:
    """`DpSgdClients` of one client whose examples after the first `ordinary` ones are canaries: each step's noised sum
    scores them. If there are fewer places than canaries, only those that are in have one."""

    def __init__(self, client: OneClient, canaries: Canaries, ordinary: int) -> None:
        assert client.settings.example is not None
        self.client, self.canaries, self.ordinary = client, canaries, ordinary
        self.noise = client.settings.example.noise_multiplier
        everyone = np.arange(len(canaries.rows))
        self.places = everyone if len(client.examples) - ordinary == len(everyone) else everyone[canaries.included]
        self.known = torch.zeros(len(canaries.signs), dtype=torch.float64)
        self.scores = np.zeros(len(canaries.rows))

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> Tensor:
        return self.client.poisson_batch(probabilities, step=step)

    def clipped_sums(self, params: list[Tensor], batch: Tensor, l2_norm_clip: float) -> Tensor:
        ordinary = batch[batch < self.ordinary]
        sums = self.client.clipped_sums(params, ordinary, l2_norm_clip)
        self.known = sums[0].to(torch.float64, copy=True)
        drawn = self.places[batch[batch >= self.ordinary].numpy() - self.ordinary]
        for number in drawn[self.canaries.included[drawn]].tolist():
            gradient = LONG * l2_norm_clip * self.canaries.direction(number)
            sums += clip_by_norm(gradient.float().unsqueeze(0), l2_norm_clip)[0]
        return sums

    def add_noise(self, sums: Tensor, l2_norm_clip: float, *, step: int) -> Tensor:
        noised = self.client.add_noise(sums, l2_norm_clip, step=step)
        unknown = noised[0].double() - self.known
        self.scores = self.scores + self.canaries.along(unknown) / (l2_norm_clip * self.noise**2)
        return noised

    def views(self, rows: Tensor) -> list[Tensor]:
        return self.client.views(rows)
