"""The answers of clients that are asked together: what `discreet.client.answering` does one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from discreet.client.answering import outputs_of
from discreet.federated.query import Query
from discreet.simulation.client_examples import SharedExamples, TrainedExamples


@dataclass(frozen=True, eq=False)
class ChunkAnswers:
    """Rates one model on what many clients hold out, as one computation.

    Attributes:
        query: what is asked.
        model: its part that learns.
        data: the data set that all clients share.
        clients: who holds out what.
    """

    query: Query
    model: nn.Module
    data: SharedExamples
    clients: TrainedExamples

    def of(self, clients: Sequence[int], params: Tensor) -> Tensor:
        """The answers of clients (k,) to parameters (num_params,): (k, length), float32."""
        held = [self.clients.held_out(client) for client in clients]
        rows = torch.from_numpy(np.concatenate(held)).to(self.data.device)
        outputs = outputs_of(self.model, params, self.data.read(rows)).cpu()
        targets, sizes = self.data.targets[rows].cpu(), [len(numbers) for numbers in held]
        pairs = zip(torch.split(outputs, sizes), torch.split(targets, sizes), strict=True)
        return torch.stack([self.query.answer(*pair) for pair in pairs]).to(torch.float32)
