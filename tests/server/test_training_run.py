"""A run ends before the round that would pass its budget, and says so."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path

import pytest

from discreet.ledger.durable_ledger import DurableLedger
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate

SMALL = ["data.num_clients=20", "model.name=logistic_regression", "training.epochs=1", "seed=61493"]
COLUMNS = (
    "round,loss,accuracy,clip_norm,fraction_below,cohort,replies,epsilon_user,epsilon_example,epsilon_local,seconds"
)


def test_a_target_is_reached_at_the_planned_round_and_never_passed(tmp_path: Path) -> None:
    words = [*SMALL, "rounds=4", "privacy.user.target_epsilon=3", f"output_dir={tmp_path / 'run'}"]
    outcome = simulate(load_config(words))
    assert outcome.stopped is None
    epsilon = DurableLedger(tmp_path / "run" / "ledger.db").spent("user").epsilon(1e-3)
    assert 0.999 * 3 <= epsilon <= 3


def test_the_budget_ends_the_run_before_the_round_that_would_pass_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["rounds=50", "privacy.user.noise_multiplier=1", "privacy.user.max_epsilon=5"]
    words += ["privacy.user.too_noisy=warn"]
    with caplog.at_level(logging.INFO, logger="discreet"):
        outcome = simulate(load_config([*SMALL, *words, f"output_dir={tmp_path / 'run'}"]))
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert outcome.stopped is not None
    assert "privacy.user.max_epsilon=5" in outcome.stopped
    assert "is left" in outcome.stopped
    assert spent.epsilon(1e-3) <= 5 < spent.record(spent.entries[0][0]).epsilon(1e-3)
    assert spent.num_releases == outcome.checkpoint.round
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert any("stopped after round" in message for message in caplog.messages)


def test_the_run_folder_holds_what_is_promised(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    simulate(load_config([*SMALL, "rounds=2", f"output_dir={folder}"]))
    names = {"config.yaml", "metrics.csv", "ledger.db", "privacy.json", "model.safetensors", "checkpoint"}
    assert names <= {path.name for path in folder.iterdir()}
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.reader(file))
    assert ",".join(rows[0]) == COLUMNS
    assert [row[0] for row in rows[1:]] == ["1", "2"]
    facts = json.loads((folder / "privacy.json").read_text())
    assert [guarantee["name"] for guarantee in facts["guarantees"]] == ["user", "example", "local"]
    user, example, local = facts["guarantees"]
    assert set(user["epsilon"]) == {"pld", "rdp"}
    assert example["epsilon"] == local["epsilon"] == {"pld": "inf"}
    assert user["floating_point"]["noise"] == "grid"
    assert 0 < user["floating_point"]["delta_slack"] < 1e-15
    assert user["not_covered"]
    with pytest.raises(ConfigError, match="holds a run already: resume=true goes on with it"):
        simulate(load_config([*SMALL, "rounds=2", f"output_dir={folder}"]))
