"""A client's answer to a query about the model that it was sent, and the noise that it draws on it by itself; and to
one about its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from discreet.client.account import Refused
from discreet.client_settings import PRIVACY_DRAWS, ClientSettings
from discreet.federated.messages import TrainRequest
from discreet.federated.query import STATISTICS, Query, query_of
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.tasks.examples import Examples, TaskShape
from discreet.tasks.models import load_parameters, outputs_of

if TYPE_CHECKING:
    from dp_accounting import DpEvent


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


def own_noise(run: ClientSettings) -> OwnNoise | None:
    """The noise that each client draws on its own answers; None if that is the server's part."""
    return OwnNoise(run.evaluation.noise_multiplier, PRIVACY_DRAWS.get(run.noise, 1)) if run.rates_itself else None


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
