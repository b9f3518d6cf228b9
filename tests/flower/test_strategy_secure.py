"""DPFedAvg under secure aggregation: another app's client with the mod, and a server that reads sums alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

import discreet
from discreet.ledger.durable_ledger import DurableLedger
from discreet.protocol.masked_messages import MASKING
from discreet.server.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import NODES, SETTINGS, Answer, Nodes, arrays, changed_by, run, values_of

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
