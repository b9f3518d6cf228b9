"""The answers of virtual clients to queries: about a model, of many clients together, and about their data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from discreet.client.release import LocalNoise, OwnNoise
from discreet.federated.messages import TrainReply
from discreet.federated.query import Query
from discreet.privacy.randomness import RandomSource
from discreet.settings.run_config import RunConfig
from discreet.simulation.client_examples import SharedExamples, TrainedExamples, client_examples_of
from discreet.tasks.examples import Task
from discreet.tasks.models import load_parameters, outputs_of


@dataclass(frozen=True, eq=False)
class ChunkAnswers:
    """Rates one model on what many clients hold out, as one computation.

    Attributes:
        model: its part that learns.
        data: the data set that all clients share.
        clients: the examples that each holds out.
        noise: of each client on its own answer; None if the server noises their sum.
    """

    query: Query
    model: nn.Module
    data: SharedExamples
    clients: TrainedExamples
    noise: OwnNoise | LocalNoise | None = None

    def of(self, clients: Sequence[int], params: Tensor, sources: Sequence[RandomSource]) -> Tensor:
        """The answers of clients (k,), each with its source of randomness, on parameters (num_params,): (k, length), or
        (k, length + 1) if they noise them; float32."""
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


def data_answers(query: Query, config: RunConfig, task: Task) -> Iterator[TrainReply]:
    """Each client's answer, from the examples that it trains on. `task` is as it was loaded, not normalised."""
    clients = client_examples_of(task, config.data)
    if config.evaluation.private:
        clients = TrainedExamples(clients, config.evaluation.share)
    for client in range(config.data.num_clients):
        held = task.train.subset(torch.from_numpy(clients.examples(client)))
        yield TrainReply(1, torch.zeros(0), False, answer=query.answer(held.inputs, held.targets).to(torch.float32))
