"""A node under secure aggregation: its owner's key, list, policy and ledger come first, and a refusal says why."""

from __future__ import annotations

import json
from pathlib import Path

from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.run_folder import RunFolder
from tests.flower.masked_grid import Nodes, federated, nodes, words_of


def replies(folder: Path) -> list[object]:
    return [row["replies"] for row in RunFolder(folder).read_metrics()]


def only(grid: Nodes, node: int, **more: str) -> Nodes:
    """The same nodes, of which one has something else set up."""
    grid.configs[node] |= more
    return grid


def test_a_node_whose_owner_requires_secure_aggregation_refuses_a_run_in_the_clear(tmp_path: Path) -> None:
    grid = only(nodes(tmp_path), 1, require="secure")
    federated(words_of(tmp_path / "run", "privacy.user.aggregation=plain", rounds=1), grid)
    assert grid.refusals() == [
        "the policy of this client requires secure aggregation, and the run would read its update"
    ]
    assert replies(tmp_path / "run") == [3]


def test_a_node_that_is_not_set_up_for_it_is_missing_and_names_what_it_needs(tmp_path: Path) -> None:
    grid = nodes(tmp_path)
    del grid.configs[4]["peers"]
    federated(words_of(tmp_path / "run", rounds=1), grid)
    said = "this node can't take part in secure aggregation without peers in its --node-config"
    assert {*grid.refusals()} == {said}
    assert replies(tmp_path / "run") == [3]


def test_a_node_with_a_spent_budget_sends_no_vector_and_is_charged_nothing(tmp_path: Path) -> None:
    grid = only(nodes(tmp_path), 2, **{"max-epsilon": "4", "max-delta": "1e-3"})
    federated(words_of(tmp_path / "run", "privacy.user.max_epsilon=4", rounds=1), grid)
    first = DurableLedger(tmp_path / "node-1.db").spent("user")
    assert first.num_releases == 1
    more = words_of(tmp_path / "more", "privacy.user.max_epsilon=4", rounds=1)
    federated(more, grid)
    # Over both runs it would be more: its own ledger says so, whatever the server counts.
    assert any("the user-level budget is spent" in reason for reason in grid.refusals())
    assert DurableLedger(tmp_path / "node-1.db").spent("user") == first


def test_a_node_that_has_another_key_in_its_list_is_missing_and_the_server_is_told_no_path(tmp_path: Path) -> None:
    grid = nodes(tmp_path)
    keys = json.loads((tmp_path / "public" / "peers.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**keys, "node-3": keys["node-2"], "node-2": keys["node-3"]}))
    federated(words_of(tmp_path / "run", rounds=1), only(grid, 4, peers=str(other)))
    assert set(grid.refusals()) == {"this node's key or its list of peers can't be used; its log says why"}
    assert replies(tmp_path / "run") == [3]
