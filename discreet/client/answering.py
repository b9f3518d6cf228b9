"""A client's answer to a query about the model that it was sent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from discreet.federated.query import Query
from discreet.tasks.examples import Examples
from discreet.tasks.models import load_parameters

BATCH = 1024


@torch.no_grad()
def outputs_of(model: nn.Module, params: Tensor, inputs: Tensor) -> Tensor:
    """What the model gives with these parameters, (n, k), in evaluation mode: dropout is off. Its training mode is left
    as it was."""
    load_parameters(model, params)
    was_training = model.training
    model.eval()
    try:
        return torch.cat([model(part) for part in torch.split(inputs, BATCH)])
    finally:
        model.train(was_training)


def answer_to(query: Query, model: nn.Module, params: Tensor, held_out: Examples) -> Tensor:
    """The answer of a client with these held-out examples, (length,), float32."""
    outputs = outputs_of(model, params, held_out.inputs)
    return query.answer(outputs, held_out.targets).to(torch.float32)
