"""The audit of a step that clients share under secure aggregation: its canary is an example of one client."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from discreet.audit.canaries import Canary
from discreet.audit.canary_scores import Experiment
from discreet.audit.example_audit import model_and_examples
from discreet.audit.release_audit import LONG, MakeVector, Release, repeated, vectors
from discreet.data.examples import Examples, Task
from discreet.mechanisms.masked_gaussian import MaskedSum
from discreet.models.models import flatten_parameters
from discreet.node.account import Refused
from discreet.node.client import Client
from discreet.node.policy import ClientPolicy
from discreet.node.release import Values, noised_vector
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.privacy.randomness import source_of
from discreet.protocol.messages import TrainRequest
from discreet.server.plan import Plan
from discreet.server.run_plan import cohort_sampling, round_settings
from discreet.server.state import initial_state
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import EXAMPLE
from discreet.settings.rules import ConfigError
from discreet.training.losses import loss_of

LOOKED_AT = 256  # examples, of which the canary is one


def audit_shared_step(
    plan: Plan, task: Task, *, releases: int, client: int = 0, make: MakeVector = noised_vector
) -> Experiment:
    """Repeats the first step of a run with `privacy.example.aggregation=secure`, and scores an example of a client by
    what it moves the opened sum by.

    The canary is the one with the longest gradient, after its inputs were made far larger. It goes the way of all
    examples, through the client's own clip and sum.

    Raises:
      ConfigError: there is no secure aggregation with noise at example level, the client has no example or more than
        it may have, or there are fewer than two releases.
    """
    settings = round_settings(plan)
    if not isinstance(settings.release, MaskedSum) or not plan.noised(EXAMPLE):
        raise ConfigError("an audit of a shared step needs privacy.example.aggregation=secure, with noise")
    request, params, without, within = step_parts(plan, task, client)
    added, start = within.update - without.update, initial_state(params, clip_norm=math.inf)
    silent, vector = replace(without, update=torch.zeros_like(added)), settings.release.vector
    replies = vectors(vector, make, (request, within), (request, without), (request, silent))
    canary = Canary(added.double() / settings.release.norm(math.inf))
    name, event = "a step that clients share", settings.release.event
    release = Release(name, EXAMPLE, event, settings, start, replies, canary, known=without.update)
    return repeated(plan, release, cohort_sampling(plan), releases, {"client": client})


def step_parts(plan: Plan, task: Task, client: int) -> tuple[TrainRequest, Tensor, Values, Values]:
    """The request of a run's first step, its parameters, and a client's answer without the canary and with it.

    Raises:
      ConfigError: the client has no example, or more than it may have.
    """
    model, examples = model_and_examples(plan, task, client)
    if len(examples) == 0:
        raise ConfigError(f"client {client} has no example that could be a canary")
    request, params = TrainRequest(1, math.inf, plan.run), flatten_parameters(model)
    canary = _worst_of(examples, model, plan.run)
    more = Examples(torch.cat([examples.inputs, canary.inputs]), torch.cat([examples.targets, canary.targets]))
    nodes = (Client(model, share, None, ClientPolicy(), source_of(plan.seed)) for share in (examples, more))
    try:
        without, within = (node._values(request, params)[0] for node in nodes)  # no client of a run gives them away
    except Refused as refusal:
        raise ConfigError(str(refusal)) from refusal
    return request, params, without, within


def _worst_of(examples: Examples, model: nn.Module, run: ClientSettings) -> Examples:
    """The one of the first examples whose gradient is the longest, with far larger inputs if they are numbers."""
    few = examples.subset(torch.arange(min(LOOKED_AT, len(examples))))
    if few.inputs.is_floating_point():
        few = Examples(few.inputs * LONG, few.targets)
    clip, loss = run.example.clip_norm, loss_of(run.task)
    _, norms = clipped_gradient_sum(model, few.inputs, targets=few.targets, clip_norm=clip, loss=loss)
    return few.subset(norms.nan_to_num(posinf=0.0).argmax().reshape(1))
