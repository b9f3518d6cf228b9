"""Clients trained together do what each would do alone, for the same random draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.own_models import OWN
from discreet.privacy.randomness import RandomSource
from discreet.simulation.chunk import Chunk, SecureDraws, chunk_updates
from discreet.simulation.client_examples import shared_examples, table_of
from discreet.training.local_training import ExamplePrivacy, LocalSettings
from tests.simulation.chunks import Clients, apart

SIZES = (13, 7, 7, 3, 1, 0)
EXAMPLE = ExamplePrivacy(0.5, 0.3)
SGD = LocalSettings(2, 5, 0.1, 0.0)
WAYS = {
    "sgd": SGD,
    "momentum": replace(SGD, momentum=0.6),
    "dp-sgd": replace(SGD, example=EXAMPLE),
    "dp-sgd with momentum": replace(SGD, momentum=0.6, example=EXAMPLE),
    "dp-sgd in secure mode": replace(SGD, epochs=1, example=replace(EXAMPLE, draws=4)),
    "dp-sgd by a declared number": replace(SGD, example=replace(EXAMPLE, public_num_examples=11)),
    "whole batches": replace(SGD, batch_size=64, example=EXAMPLE),
    "batches of one": replace(SGD, batch_size=1, epochs=1),
    "weight decay and a schedule": replace(SGD, momentum=0.6, weight_decay=0.3, schedule="cosine"),
    "adamw": replace(SGD, learning_rate=0.01, optimizer="adamw", weight_decay=0.3, schedule="linear"),
    "dp-sgd with adam": replace(SGD, learning_rate=0.01, optimizer="adam", weight_decay=0.3, example=EXAMPLE),
    "dp-sgd with a schedule": replace(SGD, momentum=0.6, schedule="linear", example=EXAMPLE),
}
MODELS = {
    "logistic_regression": (1, 8, 8),
    "mlp": (1, 8, 8),
    "mlp200": (4,),
    "cnn": (1, 8, 8),
    "lstm": (6,),
    **dict.fromkeys(OWN, (1, 8, 8)),
}


def secure() -> RandomSource:
    """From a key of the test's own, so that its verdict is the same each time."""
    return RandomSource(bytes(range(32)), is_secure=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_chunk_of_clients_is_each_of_them_alone(model: str, way: str) -> None:
    clients = Clients(model, MODELS[model], SIZES)
    assert apart(clients.together(WAYS[way]), clients.alone(WAYS[way])) < 2e-5


def test_the_comparison_finds_another_learning_rate() -> None:
    clients = Clients("mlp", (1, 8, 8), SIZES)
    assert apart(clients.together(SGD), clients.alone(replace(SGD, learning_rate=0.1001))) > 5e-4


def test_examples_that_are_not_finite_spoil_no_other_client_and_are_dropped_by_dp_sgd() -> None:
    clients = Clients("mlp", (1, 8, 8), (6, 6, 6))
    data = clients.data
    data.inputs[clients.held[1][2]] = torch.nan
    shared = shared_examples(data, torch.device("cpu"))
    spoilt = chunk_updates(replace(clients.chunk([SGD] * 3, SecureDraws(secure())), data=shared), clients.start)
    assert torch.isfinite(spoilt).all(1).tolist() == [True, False, True]
    how, held = replace(SGD, example=ExamplePrivacy(0.5, 0.0), batch_size=64), clients.held[1]
    table = table_of([held, np.delete(held, 2)])
    updates = chunk_updates(Chunk(clients.layers, shared, table, [how] * 2, SecureDraws(secure())), clients.start)
    assert apart(updates[:1], updates[1:]) < 1e-5
