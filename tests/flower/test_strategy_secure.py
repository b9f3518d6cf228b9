"""DPFedAvg under secure aggregation, whose server reads sums alone, and with nodes that take turns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

import discreet
from discreet.flower.strategy_settings import FixedClipping
from discreet.ledger.durable_ledger import DurableLedger
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.protocol.masked_messages import MASKING
from discreet.server.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import NODES, SETTINGS, Answer, Nodes, arrays, changed_by, replying, run, values_of

GAUSSIAN = discreet.MaskedGaussian(
    noise_multiplier=1e-9, delta=1e-3, too_noisy="warn", clipping=discreet.FixedClipping(1.0)
)
MASKED = {"mechanism": GAUSSIAN, "sampling": "everyone", "population_size": NODES, "seed": None}


def with_mod(answer: Answer, seen: list[Message]) -> Answer:
    """A client whose app has the mod; `seen` are the messages that reach the app."""

    def app(message: Message, context: Context) -> Message:
        seen.append(message)
        content = answer(message)
        assert isinstance(content, RecordDict)
        return Message(content, reply_to=message)

    def reply(message: Message) -> Any:
        said = discreet.secure_sum_mod(message, Context(1, 1, {}, RecordDict(), {}), app)
        return said.error if said.has_error() else said.content

    return reply


def grid_of(seen: list[Message]) -> Nodes:
    return Nodes(answers={node: with_mod(changed_by(0.01 * node), seen) for node in range(1, NODES + 1)})


def test_the_mean_of_what_clients_change_is_applied_and_none_of_it_was_sent_in_the_clear(tmp_path: Path) -> None:
    seen: list[Message] = []
    grid = grid_of(seen)
    result = run(tmp_path / "run", grid, num_rounds=1, **MASKED)
    # All are asked, and no update is clipped. A step of the grid is 1 / 4096, the noise about one step.
    moved = values_of(result)["weight"] - arrays()["weight"].numpy()
    np.testing.assert_allclose(moved, 0.035, atol=1e-3)
    assert {*seen[0].content} == {"arrays", "config"}  # the app sees what it always saw
    assert len(seen) == NODES
    assert all(MASKING in message.content or message in seen for message in grid.sent.values())
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 1
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [NODES]


def test_a_client_with_the_mod_refuses_to_train_in_the_clear(tmp_path: Path) -> None:
    seen: list[Message] = []
    run(tmp_path / "run", grid_of(seen), num_rounds=1, population_size=NODES)
    assert seen == []
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [0]


WRONG: dict[str, dict[str, Any]] = {
    "sampling must be everyone with mechanism=MaskedGaussian": {"sampling": "poisson"},
    "^accountant must be rdp": {"mechanism": replace(GAUSSIAN, accountant="pld")},
    "^dropouts must be": {"mechanism": replace(GAUSSIAN, dropouts=5)},
    "private_evaluation must be None": {"private_evaluation": discreet.PrivateEvaluation()},
}


def test_what_secure_aggregation_needs_is_said_of_the_argument() -> None:
    for message, given in WRONG.items():
        with pytest.raises(ConfigError, match=message):
            discreet.DPFedAvg(**{**SETTINGS, **MASKED, **given})


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


NO_TURNS: dict[str, dict[str, Any]] = {
    "groups must be given with sampling=cyclic": turns(groups=None),
    "clipping must be fixed": turns(clipping=discreet.AdaptiveClipping(0.5)),
    "noise must be grid": turns(noise="float"),
    "fraction_train must be 1 with sampling=cyclic": {**turns(), "fraction_train": 0.5},
}


def test_what_does_not_go_with_turns_is_refused_in_the_words_of_the_arguments(tmp_path: Path) -> None:
    for said, words in NO_TURNS.items():
        with pytest.raises(ConfigError, match=f"^{said}"):
            run(tmp_path / "run", **words)
