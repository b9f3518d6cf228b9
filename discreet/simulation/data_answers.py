"""What virtual clients answer to a query about their data: one after the other, whatever engine trains them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from discreet.config import RunConfig
from discreet.federated.messages import TrainReply
from discreet.federated.query import Query
from discreet.simulation.client_examples import TrainedExamples, client_examples_of
from discreet.tasks.examples import Task


def data_answers(query: Query, config: RunConfig, task: Task) -> Iterator[TrainReply]:
    """Each client's answer, from the examples that it trains on. `task` is as it was loaded, not normalised."""
    clients = client_examples_of(task, config.data)
    if config.evaluation.private:
        clients = TrainedExamples(clients, config.evaluation.share)
    for client in range(config.data.num_clients):
        held = task.train.subset(torch.from_numpy(clients.examples(client)))
        yield TrainReply(1, torch.zeros(0), False, answer=query.answer(held.inputs, held.targets).to(torch.float32))
