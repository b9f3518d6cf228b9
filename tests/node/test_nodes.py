"""A real node is who its owner says; a virtual client is who the request says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from discreet.node.account import Refused
from discreet.node.nodes import client_of, node_client, share_of, virtual_client
from discreet.protocol.messages import TrainRequest, VirtualClient, Work
from discreet.protocol.simulated import leave_ticket
from discreet.settings.settings import Settings
from tests.node.clients import OFF, config, request

DIGITS = ("data.name=digits", "data.num_clients=4", "model.name=logistic_regression")
NODE = {"partition-id": 1, "num-partitions": 4}


def run_of(*words: str) -> Settings:
    return config(*words, *DIGITS)


def named(run: Settings, client: int, folder: Path, number: int = 1) -> TrainRequest:
    """A request for a virtual client that keeps its ledger in a folder."""
    return replace(request(run, number), virtual=VirtualClient(client, str(folder), seed=run.seed))


def test_a_node_draws_secure_noise_whatever_seed_the_request_names() -> None:
    run = run_of(*OFF, "seed=51407")
    node = node_client(named(run, 3, Path("somewhere")), NODE)
    assert node.source.is_secure
    assert torch.equal(node.examples.inputs, share_of(run.data, 1).inputs)
    assert not virtual_client(named(run, 1, Path())).source.is_secure


NORMALISED = ("data.normalise=public", "normaliser.means=[0.25]", "normaliser.deviations=[0.5]")


@pytest.mark.parametrize("virtual", [False, True], ids=["node", "virtual"])
def test_a_client_trains_and_rates_on_inputs_that_are_normalised_as_the_server_says(virtual: bool) -> None:
    run = run_of(*NORMALISED, "evaluation.kind=private", "privacy.delta=0.01")
    client = virtual_client(named(run, 1, Path())) if virtual else node_client(request(run), NODE)
    raw, held = client.examples.inputs * 0.5 + 0.25, client.held_out
    assert held is not None
    rows = torch.cat([raw, held.inputs * 0.5 + 0.25])
    expected = share_of(run.data, 1).inputs
    assert torch.allclose(rows.flatten(1).sort(dim=0).values, expected.flatten(1).sort(dim=0).values, atol=1e-6)


ASKED = ("data.normalise=private", "statistics.low=0", "statistics.high=1", "privacy.delta=0.01")


def asks(run: Settings, query: str) -> TrainRequest:
    return replace(request(run), work=Work(trains=False, query=query))


@pytest.mark.parametrize(
    ("words", "query"),
    [
        (("data.normalise=public",), "normalise"),
        ((*ASKED, "normaliser.means=[0]", "normaliser.deviations=[1]"), "normalise"),
        (ASKED, "statistics"),
    ],
    ids=["public", "once more", "another question"],
)
def test_a_node_does_not_answer_what_its_run_does_not_ask_and_pay_for(words: tuple[str, ...], query: str) -> None:
    asked = asks(run_of(*words, "privacy.delta=0.01"), query)
    with pytest.raises(Refused, match=f"does not ask for {query} of clients' data"):
        client_of(asked, NODE).answer(asked, torch.zeros(0))


def test_a_policy_counts_what_is_asked_of_the_data() -> None:
    owner = NODE | {"min-noise-multiplier": 1.0}
    noise = "privacy.user.noise_multiplier=2", "privacy.user.target_epsilon=null"
    strong, weak = (asks(run_of(*ASKED, *noise, f"statistics.noise_multiplier={z}"), "normalise") for z in (1, 0.5))
    assert client_of(strong, owner).answer(strong, torch.zeros(0)).answer is not None
    with pytest.raises(Refused, match=r"requires a noise multiplier of 1; the user-level one is 0\.5"):
        client_of(weak, owner).answer(weak, torch.zeros(0))


def test_a_ticket_can_be_read_by_its_user_alone_and_is_never_the_same(tmp_path: Path) -> None:
    assert leave_ticket(tmp_path) != leave_ticket(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("node", [{}, {"partition-id": 1}, {"partition-id": "1", "num-partitions": 4}])
def test_a_node_that_says_nothing_of_its_data_refuses(node: dict[str, object]) -> None:
    with pytest.raises(Refused, match="this node has no data"):
        node_client(request(run_of(*OFF)), node)
    with pytest.raises(Refused, match=r"one of 5 clients, the run has data\.num_clients=4"):
        node_client(request(run_of(*OFF)), {"partition-id": 1, "num-partitions": 5})
