"""A NumPyClient, asked through Flower's compatibility layer: its arrays have no names, no shapes and no dtypes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from discreet.flower.array_layout import layout_of
from discreet.flower.strategy_settings import CentralGaussian, FixedClipping
from discreet.protocol.messages import MalformedMessage
from tests.flower.flower_apps import Answer, Nodes, strategy, values_of

Arrays = list[NDArray[np.float32]]
START = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
EXACT = CentralGaussian(noise="float", noise_multiplier=0.0, clipping=FixedClipping(5.0))
NOISELESS = {"mechanism": EXACT, "sampling": "everyone"}
KEYS = {"arrayrecord_key": "fitins.parameters", "configrecord_key": "fitins.config"}


class Mover(NumPyClient):
    """Adds what the config says to every value."""

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong

    def fit(self, parameters: Arrays, config: dict[str, float]) -> tuple[Arrays, int, dict[str, float]]:
        moved = [values + np.float32(config["step"]) for values in parameters]
        return ([moved[0].T, moved[1]] if self.wrong else moved), 7, {"loss": 1.0}


def node(*, wrong: bool = False) -> Answer:
    """A node that runs the ClientApp as Flower does."""
    app = ClientApp(client_fn=lambda context: Mover(wrong).to_client())
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    return lambda message: app(message, context).content


def trained(folder: Path, *nodes: Answer) -> Result:
    """Two rounds without noise, in which each client that is whole moves every value by 0.25."""
    made = strategy(folder, **KEYS, **NOISELESS, population_size=len(nodes))
    config, start = ConfigRecord({"step": 0.25}), ArrayRecord({name: Array(value) for name, value in START.items()})
    grid = Nodes(dict(enumerate(nodes, 1)))
    return made.start(grid, start, num_rounds=2, timeout=2.0, train_config=config)


def test_it_is_driven_by_the_keys_that_it_reads_and_its_arrays_keep_their_names(tmp_path: Path) -> None:
    moved = values_of(trained(tmp_path / "run", node(), node()))
    assert list(moved) == ["weight", "bias"]
    for name, values in START.items():
        np.testing.assert_allclose(moved[name], values + 0.5, atol=1e-6)


@pytest.mark.parametrize("names", [("0",), ("0", "2"), ("0", "1", "2"), ("1", "bias")])
def test_arrays_that_are_not_numbered_from_0_to_the_last_are_malformed(names: tuple[str, ...]) -> None:
    layout = layout_of(ArrayRecord({name: Array(value) for name, value in START.items()}))
    reply = ArrayRecord({name: Array(START["bias"]) for name in names})
    with pytest.raises(MalformedMessage, match="arrays instead of 2; differing"):
        layout.difference(reply, np.zeros(layout.num_params, np.float32))


def test_arrays_whose_names_are_numbers_in_another_order_are_taken_by_name() -> None:
    layout = layout_of(ArrayRecord({"1": Array(np.zeros(1, np.float32)), "0": Array(np.zeros(1, np.float32))}))
    reply = ArrayRecord({"0": Array(np.full(1, 5, np.float32)), "1": Array(np.full(1, 7, np.float32))})
    assert layout.vector(reply).tolist() == [7, 5]
