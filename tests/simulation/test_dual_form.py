"""Training in the dual form is training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from discreet.simulation.chunk import SeededDraws, dual_is_cheaper, dual_sgd
from discreet.training.local_training import ExamplePrivacy, LocalSettings
from tests.simulation.chunks import Clients, apart

PLAIN = LocalSettings(1, 10, 0.1, 0.0)


def in_span(clients: Clients, how: LocalSettings) -> torch.Tensor:
    return dual_sgd(clients.chunk([how] * len(clients.sizes), SeededDraws(clients.sources())), clients.start)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    epochs=st.integers(1, 3),
    batch_size=st.integers(1, 13),
    momentum=st.sampled_from([0.0, 0.7]),
    model=st.sampled_from(["logistic_regression", "mlp", "mlp200"]),
)
def test_it_moves_clients_as_each_moves_alone(
    sizes: list[int], epochs: int, batch_size: int, momentum: float, model: str
) -> None:
    clients = Clients(model, (6,), tuple(sorted(sizes, reverse=True)))
    how = LocalSettings(epochs, batch_size, 0.1, momentum)
    assert apart(in_span(clients, how), clients.alone(how)) < 1e-4


def test_it_is_taken_where_the_first_layer_is_large_for_the_examples() -> None:
    layers = Clients("mlp", (784,), (1,)).layers
    assert dual_is_cheaper(layers, 60, PLAIN)
    assert not dual_is_cheaper(layers, 5000, PLAIN)
    assert dual_is_cheaper(layers, 300, replace(PLAIN, epochs=5))
    assert not dual_is_cheaper(layers, 0, PLAIN)


@pytest.mark.parametrize(
    "other",
    [{"example": ExamplePrivacy(1.0, 1.0)}, {"optimizer": "adam"}, {"weight_decay": 0.1}, {"schedule": "cosine"}],
    ids=str,
)
def test_it_is_not_taken_for_what_it_does_not_compute(other: dict[str, Any]) -> None:
    """The noise of DP-SGD leaves the span of the examples."""
    assert not dual_is_cheaper(Clients("mlp", (784,), (1,)).layers, 60, replace(PLAIN, **other))


@pytest.mark.parametrize(("model", "shape"), [("cnn", (1, 8, 8)), ("lstm", (6,))])
def test_it_is_not_taken_for_models_that_do_not_start_with_a_linear_layer(model: str, shape: tuple[int, ...]) -> None:
    assert not dual_is_cheaper(Clients(model, shape, (1,)).layers, 4, PLAIN)


def test_both_ways_agree_on_the_same_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, how = Clients("mlp", (1, 8, 8), (9, 4)), LocalSettings(2, 4, 0.1, 0.5)
    together = clients.together(how)
    monkeypatch.setattr("discreet.simulation.chunk.dual_is_cheaper", lambda *_: False)
    assert apart(together, clients.together(how)) < 1e-5
