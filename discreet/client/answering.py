"""A client's answer to a query about the model that it was sent, and the noise that it draws on it by itself; and to
one about its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from discreet.client.account import Refused
from discreet.client.local_privacy import LocalPrivacy, release_update
from discreet.federated.messages import TrainRequest
from discreet.federated.query import STATISTICS, Query, query_of
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import PRIVACY_DRAWS
from discreet.tasks.answers import l1_norm_of
from discreet.tasks.examples import Examples, TaskShape
from discreet.tasks.models import load_parameters, outputs_of

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LAPLACE = "laplace"  # the local noise that is drawn for an L1 norm


@dataclass(frozen=True)
class OwnNoise:
    """How a client noises its own answer, for one of its examples.

    Guarantee (zero-out: one example contributes nothing, and how many there are stays): an answer is the mean, over m
    held-out examples, of vectors of L2 norm at most 1 (`client_settings.MEANS`), so one of them moves it by at most
    1 / m, and the noise is drawn for that. The release is one Gaussian of `noise_multiplier`, whoever is in the cohort:
    the server sees who answers.
    """

    noise_multiplier: float
    draws: int = 1

    @property
    def mechanism(self) -> Gaussian:
        """What noises an answer."""
        return Gaussian(self.noise_multiplier, draws=self.draws)

    @property
    def event(self) -> DpEvent:
        """What one answer costs each held-out example."""
        return self.mechanism.event()

    def noised(self, answer: Tensor, held_out: int, source: RandomSource) -> Tensor:
        """What leaves of an answer (length,) about so many examples: (length + 1,), float32, whose last number is the
        variance of the noise on each of the others. It follows from `held_out`, which zero-out does not hide. A client
        that holds nothing out sends zeros, as one that is missing."""
        if held_out == 0:
            return torch.zeros(len(answer) + 1)
        sensitivity = 1 / held_out
        noised = self.mechanism.add_noise(answer.double(), sensitivity, source.child("answer"))
        variance = torch.tensor([self.mechanism.stddev(sensitivity) ** 2], dtype=torch.float64)
        return torch.cat([noised, variance]).to(torch.float32)


@dataclass(frozen=True)
class LocalNoise:
    """How a client noises its own answer, for all of its data.

    Guarantee (replace): an answer is clipped to a norm that it can't pass anyway, in L2 for Gaussian noise and in L1
    for Laplace noise, so other data of this client move it by at most twice that norm. The noise is drawn for that
    (`local_privacy.release_update`), whoever is in the cohort, and on the zeros of a client that holds nothing out too:
    how much a client holds is part of what is hidden.
    """

    privacy: LocalPrivacy

    @property
    def event(self) -> DpEvent:
        """What one answer costs the client."""
        return self.privacy.event

    def noised(self, answer: Tensor, held_out: int, source: RandomSource) -> Tensor:
        """What leaves of an answer (length,): (length + 1,), float32, whose last number is the variance of the noise on
        each of the others, a public constant. `held_out` decides nothing."""
        sent = release_update(answer.to(torch.float32), self.privacy, source=source.child("answer"))
        scale = 2 * self.privacy.clip_norm * self.privacy.noise_multiplier
        variance = 2 * scale**2 if self.privacy.kind == LAPLACE else scale**2
        return torch.cat([sent.double(), torch.tensor([variance], dtype=torch.float64)]).to(torch.float32)


def own_noise(run: ClientSettings, query: Query | None = None) -> OwnNoise | LocalNoise | None:
    """The noise that each client draws on its own answers; None if that is the server's part. `query`: what is asked;
    None if only the event matters, which is the same for each."""
    if not run.rates_itself:
        return None
    noise_multiplier, kind = run.evaluation.noise_multiplier, run.local.kind
    if kind == "none":
        return OwnNoise(noise_multiplier, PRIVACY_DRAWS.get(run.noise, 1))
    norm = l1_norm_of(query.blocks) if query is not None and kind == LAPLACE else 1.0
    return LocalNoise(LocalPrivacy(kind, norm, noise_multiplier, run.noise))


def answer_to(query: Query, model: nn.Module, params: Tensor, held_out: Examples) -> Tensor:
    """The answer of a client with these held-out examples, (length,), float64."""
    load_parameters(model, params)
    return query.answer(outputs_of(model, held_out.inputs), held_out.targets)


def answer_of_data(request: TrainRequest, examples: Examples, shape: TaskShape | None) -> Tensor:
    """The answer of a client with these examples to a question about its data, (length,), float32.

    Raises:
      Refused: the run does not ask it, and so does not plan to pay for it.
      ConfigError: what the run asks does not fit such data.
    """
    run, name = request.run, request.work.query
    asked = run.statistics.only if name == STATISTICS else run.data.normalise == "private" and not run.normaliser.means
    if not asked or request.work.trains or shape is None:
        raise Refused(f"this run does not ask for {name} of clients' data")
    return query_of(name, run, shape).answer(examples.inputs, examples.targets).to(torch.float32)
