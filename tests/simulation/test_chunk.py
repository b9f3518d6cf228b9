"""Clients trained together do what each would do alone, for the same random draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.own_models import OWN
from discreet.privacy.randomness import RandomSource
from discreet.simulation.chunk import Chunk, SecureDraws, chunk_updates
from discreet.simulation.client_examples import shared_examples, table_of
from discreet.training.local_training import ExamplePrivacy, LocalSettings, sampling_probability
from tests.node.clients import clipped, gradients, write
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


def test_where_no_client_has_a_batch_each_still_draws_the_noise_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "discreet.training.local_training.poisson_sample", lambda *_, **__: torch.zeros(0, dtype=torch.int64)
    )
    clients, how = Clients("logistic_regression", (2,), (9, 7, 2)), replace(SGD, example=EXAMPLE)
    steps = (4, 4, 2)  # 2 epochs of ceil(n / 5)
    drawn = [
        torch.stack([source.child("step", step).child("noise").normal(15) for step in range(count)]).sum(0)
        for source, count in zip(clients.sources(), steps, strict=True)
    ]
    expected = -0.1 * 0.3 * 0.5 / 5 * torch.stack(drawn)
    torch.testing.assert_close(clients.together(how), expected, rtol=1e-4, atol=1e-6)


def test_a_poisson_batch_counts_whole_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discreet.training.local_training.poisson_sample", lambda count, **_: torch.arange(count))
    clients = Clients("logistic_regression", (2,), (12, 9))
    updates = clients.together(replace(SGD, epochs=1, batch_size=3, example=ExamplePrivacy(0.5, 0.0)))
    for update, numbers in zip(updates, clients.held, strict=True):
        model, data = nn.Sequential(nn.Linear(2, 5)), clients.data.subset(torch.from_numpy(numbers))
        params = clients.start
        for _ in range(len(numbers) // 3):  # every step adds up all of the client's examples, and divides by 3
            write(model, params)
            params = params - 0.1 * clipped(gradients(model, data), 0.5) / 3
        torch.testing.assert_close(update, params - clients.start, rtol=1e-4, atol=1e-6)


def test_a_client_that_is_not_finite_spoils_nobody_else() -> None:
    clients = Clients("cnn", (1, 8, 8), (4, 4, 4))
    data = clients.data
    data.inputs[torch.from_numpy(clients.held[1])] = torch.inf
    chunk = replace(clients.chunk([SGD] * 3, SecureDraws(secure())), data=shared_examples(data, torch.device("cpu")))
    updates = chunk_updates(chunk, clients.start)
    assert torch.isfinite(updates).all(1).tolist() == [True, False, True]


def test_dp_sgd_drops_examples_that_are_not_finite_as_alone() -> None:
    clients = Clients("mlp", (1, 8, 8), (6, 4))
    how, data = replace(SGD, example=ExamplePrivacy(0.5, 0.0), batch_size=64), clients.data
    data.inputs[clients.held[0][2]] = torch.nan
    held = [clients.held[0], np.delete(clients.held[0], 2)]
    chunk = Chunk(
        clients.layers, shared_examples(data, torch.device("cpu")), table_of(held), [how] * 2, SecureDraws(secure())
    )
    updates = chunk_updates(chunk, clients.start)
    assert apart(updates[:1] * (64 / 64), updates[1:]) < 1e-5


def test_clients_of_unlike_noise_each_get_their_own() -> None:
    """Empty batches leave noise alone; false alarm below 1e-9 for 2,570 normal values and a factor of 1.5."""
    clients = Clients("logistic_regression", (256,), (2, 1))
    rare = LocalSettings(1, 1, 1.0, 0.0)
    how = [replace(rare, example=ExamplePrivacy(1e-6, noise)) for noise in (4e6, 1e6)]
    chunk = clients.chunk(how, SecureDraws(secure()))
    first, second = chunk_updates(chunk, clients.start).std(dim=1).tolist()
    steps = (2 / 1) ** 0.5  # two steps for the first client, one for the second
    assert 0.8 * 4 * steps < first < 1.2 * 4 * steps
    assert 0.8 < second < 1.2
    assert sampling_probability(2, rare) == 0.5
