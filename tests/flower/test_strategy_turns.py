"""DPFedAvg(mechanism=CorrelatedNoise(...)): nodes of any Flower app take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import discreet
from discreet.flower.strategy_settings import FixedClipping
from discreet.ledger.durable_ledger import DurableLedger
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import NODES, Nodes, changed_by, replying, run

TURNS = {"target_epsilon": 4.0, "delta": 1e-3, "clipping": FixedClipping(0.5), "groups": 3}


def turns(**changed: Any) -> dict[str, Any]:
    return {"sampling": "cyclic", "mechanism": discreet.CorrelatedNoise(**{**TURNS, **changed})}


def test_each_node_is_asked_in_its_turn_alone_and_the_target_is_met(tmp_path: Path) -> None:
    grid = Nodes()
    run(tmp_path / "run", grid, num_rounds=7, **turns())
    asked = [(int(each.metadata.group_id), each.metadata.dst_node_id) for each in grid.sent.values()]
    assert asked == [
        (number, node) for number in range(1, 8) for node in range(1, NODES + 1) if node % 3 == (number - 1) % 3
    ]
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert 3.99 < spent.epsilon(1e-3) <= 4.0 * (1 + 1e-9)
    events = [
        event.noise_multiplier**-2 * count for event, count in spent.entries if hasattr(event, "noise_multiplier")
    ]
    assert analytic_gaussian_noise_multiplier(4.0, delta=1e-3) == pytest.approx(sum(events) ** -0.5, rel=1e-3)
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())["guarantees"][0]
    assert "3 public groups in turn" in said["mechanism"]
    assert "one node" in said["adjacency"]


def test_nodes_that_miss_their_turn_change_neither_noise_nor_account(tmp_path: Path) -> None:
    there, gone = Nodes(), Nodes({node: changed_by(0.01) if node % 2 else replying(None) for node in range(1, 7)})
    for name, grid in (("there", there), ("gone", gone)):
        run(tmp_path / name, grid, num_rounds=3, **turns())
    one, other = (DurableLedger(tmp_path / name / "ledger.db").spent("user") for name in ("there", "gone"))
    assert one == other


WRONG: dict[str, dict[str, Any]] = {
    "groups must be given with sampling=cyclic": turns(groups=None),
    "clipping must be fixed": turns(clipping=discreet.AdaptiveClipping(0.5)),
    "noise must be grid": turns(noise="float"),
    "fraction_train must be 1 with sampling=cyclic": {**turns(), "fraction_train": 0.5},
}


def test_what_does_not_go_with_turns_is_refused_in_the_words_of_the_arguments(tmp_path: Path) -> None:
    for said, words in WRONG.items():
        with pytest.raises(ConfigError, match=f"^{said}"):
            run(tmp_path / "run", **words)
