"""A run of DPFedAvg that was ended goes on as if it had not been, or says in one line why it can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord

from discreet.flower.strategy_settings import AdaptiveClipping
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.server.run_folder import RunFolder
from discreet.server.server_optimizer import ServerSGD
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import START, Nodes, arrays, noised, run, status_of, strategy, values_of


def test_a_run_that_goes_on_ends_as_one_that_was_never_ended(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", num_rounds=4, server_optimizer=ServerSGD(momentum=0.5))
    run(tmp_path / "parts", num_rounds=2, server_optimizer=ServerSGD(momentum=0.5))
    parts = run(tmp_path / "parts", num_rounds=4, server_optimizer=ServerSGD(momentum=0.5), resume=True)
    assert all(np.array_equal(values_of(whole)[name], values_of(parts)[name]) for name in START)
    heads = [RunFolder(tmp_path / name).read_metrics()[-1] for name in ("whole", "parts")]
    assert heads[0]["epsilon_user"] == heads[1]["epsilon_user"]


def test_what_is_not_learned_keeps_the_value_that_the_run_began_with(tmp_path: Path) -> None:
    table, other = np.arange(6).reshape(2, 3), {"table": np.zeros((2, 3), int), "steps": np.array(99)}
    start = arrays(table=np.asfortranarray(table))
    strategy(tmp_path / "run").start(Nodes(), start, num_rounds=1, timeout=2.0)
    again = strategy(tmp_path / "run", resume=True)
    result = values_of(again.start(Nodes(), arrays(**other), num_rounds=2, timeout=2.0))
    assert result["steps"] == 3
    assert np.array_equal(result["table"], table)


def test_an_interrupted_run_says_so_and_how_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def evaluate(number: int, found: ArrayRecord) -> MetricRecord:
        if number == 2:
            raise KeyboardInterrupt
        return MetricRecord({"loss": 1.0})

    with pytest.raises(KeyboardInterrupt):
        strategy(tmp_path / "run").start(Nodes(), arrays(), num_rounds=3, timeout=2.0, evaluate_fn=evaluate)
    folder = RunFolder(tmp_path / "run")
    assert status_of(folder.path).state == "interrupted"
    assert f'interrupted after round 1: resume=True, output_dir="{folder.path}" goes on' in caplog.text
    # Round 2 was charged before it was evaluated, and is done again: the ledger says more, never less.
    run(tmp_path / "run", num_rounds=3, resume=True)
    assert DurableLedger(folder.ledger_path).spent("user").num_releases == 4
    assert status_of(folder.path).state == "finished"


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "less noise": (noised(noise_multiplier=0.5), r"noise_multiplier=0\.5 can't change a run that is resumed"),
    "a larger delta": (noised(delta=1e-2), r"delta=0\.01 can't change"),
    "a smaller fraction": ({"fraction_train": 0.5}, r"fraction_train=0\.5 can't change"),
    "a larger budget": (noised(max_epsilon=90.0), r"max_epsilon=90\.0 can't change"),
    "another clip norm": (noised(clipping=AdaptiveClipping(5.0)), r"clip_norm=5\.0 can't change"),
    "other frozen arrays": ({"frozen": "bias"}, "initial_arrays must have the names, shapes, dtypes and frozen"),
}


def test_a_run_that_goes_on_keeps_what_decides_privacy(tmp_path: Path) -> None:
    run(tmp_path / "run", num_rounds=1)
    for settings, said in CHANGED.values():
        with pytest.raises(ConfigError, match=said):
            run(tmp_path / "run", num_rounds=2, resume=True, **settings)


def test_without_the_arrays_that_it_began_with_a_run_does_not_go_on(tmp_path: Path) -> None:
    run(tmp_path / "run", num_rounds=1)
    RunFolder(tmp_path / "run").arrays_path.unlink()
    with pytest.raises(LedgerError, match=r"arrays\.safetensors is missing"):
        run(tmp_path / "run", num_rounds=2, resume=True)


def test_a_target_is_kept_and_its_noise_does_not_follow_the_rounds(tmp_path: Path) -> None:
    target = noised(noise_multiplier=None, target_epsilon=5.0)
    run(tmp_path / "run", num_rounds=2, **target)
    made = strategy(tmp_path / "run", resume=True, **target)
    made.start(Nodes(), arrays(), num_rounds=9, timeout=2.0)
    assert made.outcome is not None
    assert "beyond max_epsilon=5" in str(made.outcome.stopped)
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 2


def test_a_loss_that_ran_away_stays_so_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    def evaluate(number: int, found: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": 1.0 + 5.0 * number})

    first, again = strategy(tmp_path / "run"), strategy(tmp_path / "run", resume=True)
    for made in (first, again):
        made.start(Nodes(), arrays(), num_rounds=20, timeout=2.0, evaluate_fn=evaluate)
        assert made.outcome is not None
        assert "diverged" in str(made.outcome.stopped)
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 5


def test_one_client_of_a_real_federation_can_not_be_given_a_seed(tmp_path: Path) -> None:
    class Real:
        get_node_ids = staticmethod(lambda: [1])

    with pytest.raises(ConfigError, match="seed must be null in a real federation"):
        strategy(tmp_path / "run").start(Real(), arrays())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
