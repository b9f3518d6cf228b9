"""DPFedAvg lets the clients of any Flower app rate the model: what is asked, read, noised and charged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MessageType, MetricRecord, RecordDict

import discreet
from discreet.server.plan import plan_of
from discreet.server.run_folder import RunFolder
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import NODES, Answer, Nodes, changed_by, noised, run

RATED: dict[str, Any] = {"private_evaluation": discreet.PrivateEvaluation(every=2, metric="acc", noise_multiplier=1e-3)}


def saying(share: float) -> Answer:
    def answer(message: Message) -> RecordDict:
        if message.metadata.message_type == MessageType.EVALUATE:
            return RecordDict({"metrics": MetricRecord({"loss": 3.0, "acc": share})})
        return changed_by(0.01)(message)

    return answer


def rows(folder: Path, shares: list[float], **settings: Any) -> tuple[list[dict[str, float | None]], Nodes]:
    grid = Nodes({number: saying(share) for number, share in enumerate(shares, start=1)})
    everyone = {"sampling": "everyone", "population_size": len(shares), **RATED, **settings}
    run(folder, grid, num_rounds=3, **everyone)
    return RunFolder(folder).read_metrics(), grid


def test_the_mean_of_what_clients_say_is_in_the_row_of_the_round_that_made_the_model(tmp_path: Path) -> None:
    found, grid = rows(tmp_path / "run", [0.5, 0.75, 1.0, 0.25])
    assert [row["accuracy"] is not None for row in found] == [False, True, True]
    assert found[1]["accuracy"] == pytest.approx(0.625, abs=0.01)
    assert found[1]["accuracy_error"] == pytest.approx(1e-3 / 8)
    asked = [message for message in grid.sent.values() if message.metadata.message_type == MessageType.EVALUATE]
    assert len(asked) == 8


@pytest.mark.parametrize("wild", [1e30, -7.0, math.nan, math.inf])
def test_one_client_moves_the_mean_by_no_more_than_its_share(tmp_path: Path, wild: float) -> None:
    found, _ = rows(tmp_path / "run", [0.5, 0.5, 0.5, wild])
    assert abs(float(str(found[1]["accuracy"])) - 0.5) <= 0.5 / 4 + 0.01


def test_a_rating_is_charged_as_an_event_of_its_own(tmp_path: Path) -> None:
    rows(tmp_path / "run", [0.5] * NODES, **noised(noise_multiplier=2.0))
    folder = RunFolder(tmp_path / "run")
    spent = folder.ledger(plan_of(folder.read_config())).spent(USER)
    assert [(event.noise_multiplier, count) for event, count in spent.entries] == [(2.0, 3), (1e-3, 2)]


def test_two_accuracies_have_no_place_in_one_row(tmp_path: Path) -> None:
    from tests.flower.flower_apps import arrays, strategy

    made = strategy(tmp_path / "run", **RATED)
    with pytest.raises(ConfigError, match="evaluate_fn must be left out with private_evaluation"):
        made.start(Nodes(), arrays(), num_rounds=1, evaluate_fn=lambda *_: None)
