"""The answers of clients that are asked together: what `discreet.client.answering` does one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from discreet.client.answering import LocalNoise, OwnNoise
from discreet.federated.query import Query
from discreet.privacy.randomness import RandomSource
from discreet.simulation.client_examples import SharedExamples, TrainedExamples
from discreet.tasks.models import load_parameters, outputs_of


@dataclass(frozen=True, eq=False)
class ChunkAnswers:
    """Rates one model on what many clients hold out, as one computation.

    Attributes:
        query: what is asked.
        model: its part that learns.
        data: the data set that all clients share.
        clients: who holds out what.
        noise: what each client draws on its own answer; None if the server noises their sum.
    """

    query: Query
    model: nn.Module
    data: SharedExamples
    clients: TrainedExamples
    noise: OwnNoise | LocalNoise | None = None

    def of(self, clients: Sequence[int], params: Tensor, sources: Sequence[RandomSource]) -> Tensor:
        """What clients (k,), each with its source of randomness, send of parameters (num_params,): (k, length), or
        (k, length + 1) if they noise their answers; float32."""
        held = [self.clients.held_out(client) for client in clients]
        rows = torch.from_numpy(np.concatenate(held)).to(self.data.device)
        load_parameters(self.model, params)
        outputs = outputs_of(self.model, self.data.read(rows))
        targets, sizes = self.data.targets[rows].cpu(), [len(numbers) for numbers in held]
        pairs = zip(torch.split(outputs, sizes), torch.split(targets, sizes), strict=True)
        answers = [self.query.answer(*pair) for pair in pairs]
        if self.noise is not None:
            drawn = zip(answers, sizes, sources, strict=True)
            answers = [self.noise.noised(answer, size, source) for answer, size, source in drawn]
        return torch.stack(answers).to(torch.float32)
