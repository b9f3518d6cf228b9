"""The audit of a step that clients share at example level: its masked sum is opened with one example and without it.

The canary is an example of one client: the one with the longest gradient, after its inputs were made far larger. It
goes the way of all examples, through the client's own clip and sum. Only the honest clients of the worst case take part
(`discreet.audit.secure_audit`), and what the others' examples add is known, and taken off: they have none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from discreet.audit.auditor import noised_sum
from discreet.audit.canary_scores import Experiment
from discreet.audit.masked_sums import MakeVector, Opening, opened, repeated
from discreet.client.account import Refused
from discreet.client.client import DPClient
from discreet.client.noised_vector import Values, noised_vector
from discreet.client.policy import ClientPolicy
from discreet.config import ConfigError, RunConfig
from discreet.federated.messages import TrainRequest
from discreet.federated.round import RoundSettings
from discreet.federated.run_plan import round_settings
from discreet.federated.secure_round import secure_round
from discreet.federated.session import checked, sizes_of
from discreet.federated.state import State, initial_state
from discreet.privacy.per_example import clipped_gradient_sum
from discreet.privacy.randomness import RandomSource, source_of
from discreet.privacy.secure_grid import SecureSum
from discreet.settings import client_settings
from discreet.simulation.client_examples import client_examples_of
from discreet.tasks.examples import Examples, Task
from discreet.tasks.fixed_features import features_of, split_fixed
from discreet.tasks.models import flatten_parameters, model_for
from discreet.training.task_loss import loss_of

LONG = 1e4  # times the inputs of the canary
LOOKED_AT = 256  # examples, of which the canary is one


@dataclass(frozen=True)
class StepAudit:
    """What is put to the test.

    Attributes:
      releases: how many steps with the canary, and as many without it.
      client: whose example it is.
    """

    releases: int = 2000
    client: int = 0


def audit_shared_step(config: RunConfig, audit: StepAudit, *, make: MakeVector = noised_vector) -> Experiment:
    """Repeats the first step of a run with `privacy.example.aggregation=secure`, and scores an example by what it moves
    the opened sum by.

    Raises:
      ConfigError: there is no secure aggregation with noise at example level, the client has no example or more than
        it may have, or there are fewer than two releases.
    """
    if not config.privacy.example.secure or config.privacy.example.noise_multiplier == 0:
        raise ConfigError("an audit of a shared step needs privacy.example.aggregation=secure, with noise")
    resolved, task = checked(config)
    settings, source = round_settings(resolved, sizes_of(resolved, task)), source_of(config.seed).child("audit")
    assert settings.secure is not None
    step = SharedStep.of(resolved, task, settings, client=audit.client)

    def score(included: bool, source: RandomSource) -> float:
        return step.score(included, source, make)

    opening = Opening("a step that clients share", settings.secure, settings.secure.event)
    return repeated(resolved, opening, score, releases=audit.releases, source=source)


@dataclass(frozen=True, eq=False)
class SharedStep:
    """A step to which the canary's client adds its sum, and all others noise alone.

    Attributes:
      values: of the canary's client, without the canary and with it.
      start: before the step.
    """

    settings: RoundSettings
    request: TrainRequest
    values: tuple[Values, Values]
    start: State

    @classmethod
    def of(cls, config: RunConfig, task: Task, settings: RoundSettings, *, client: int) -> SharedStep:
        """The first step of a run."""
        fixed, model = split_fixed(model_for(config.model.name, task.shape, seed=0))
        rows = torch.from_numpy(client_examples_of(task, config.data).examples(client))
        examples = task.train.subset(rows)
        if len(examples) == 0:
            raise ConfigError(f"client {client} has no example that could be a canary")
        if fixed is not None:
            examples = features_of(fixed, examples)
        request, params = TrainRequest(1, math.inf, client_settings(config)), flatten_parameters(model)
        canary = worst_of(examples, model, config)
        without, with_it = (
            _values(DPClient(model, share, None, ClientPolicy(), source_of(config.seed)), request, params)
            for share in (examples, joined(examples, canary))
        )
        return cls(settings, request, (without, with_it), initial_state(params, clip_norm=math.inf))

    def score(self, included: bool, source: RandomSource, make: MakeVector) -> float:
        """Of one opened sum: the log-likelihood ratio of in and out, up to rounding."""
        silent = replace(self.values[0], update=torch.zeros_like(self.values[0].update))
        each = [self.values[included], *[silent] * (self._vector.summands - 1)]
        vectors = [make(self._vector, values, self.request, source.child(number)) for number, values in enumerate(each)]
        after, _ = secure_round(self.start, opened(self._vector, vectors), self.settings, charge=lambda _: None)
        unknown = noised_sum(self.settings, self.start, after) - self.values[0].update
        return float(unknown @ self.added) / self._variance

    @property
    def added(self) -> Tensor:
        """What the canary moves its client's sum by, (num_params,) float64."""
        return self.values[1].update - self.values[0].update

    @property
    def _vector(self) -> SecureSum:
        assert self.settings.secure is not None
        return self.settings.secure

    @property
    def _variance(self) -> float:
        """Of the noise on an entry."""
        assert self.settings.norm is not None
        return (self.settings.norm * self._vector.noise_stddev) ** 2


def _values(client: DPClient, request: TrainRequest, params: Tensor) -> Values:
    """What no client of a run gives away."""
    try:
        return client._values(request, params)[0]
    except Refused as refusal:
        raise ConfigError(str(refusal)) from refusal


def joined(examples: Examples, more: Examples) -> Examples:
    """Both together."""
    return Examples(torch.cat([examples.inputs, more.inputs]), torch.cat([examples.targets, more.targets]))


def worst_of(examples: Examples, model: nn.Module, config: RunConfig) -> Examples:
    """The one of the first examples whose gradient is the longest, with far larger inputs if they are numbers."""
    few = examples.subset(torch.arange(min(LOOKED_AT, len(examples))))
    if few.inputs.is_floating_point():
        few = Examples(few.inputs * LONG, few.targets)
    clip, loss = config.privacy.example.l2_norm_clip, loss_of(config.task)
    _, norms = clipped_gradient_sum(model, few.inputs, targets=few.targets, l2_norm_clip=clip, loss=loss)
    return few.subset(norms.nan_to_num(posinf=0.0).argmax().reshape(1))
