"""Runs with local privacy whose clients rate the model: both engines, the ledger, what is published."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from discreet.accounting.accounting import pure_epsilon
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.privacy import LOCAL
from discreet.simulation.in_process import simulate

WORDS = (
    *("evaluation.kind=private", "evaluation.every=2", "evaluation.noise_multiplier=2", "rounds=3", "seed=55147"),
    *("data.num_clients=40", "training.epochs=1", "model.name=linear", "sampling.kind=everyone"),
    *("privacy.user.enabled=false", "privacy.local.clip_norm=0.1"),
)


def run(folder: Path, *words: str) -> RunFolder:
    simulate(load_config([*WORDS, *words, f"output_dir={folder}"]))
    return RunFolder(folder)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_both_engines_give_the_same_ratings_and_charge_the_same(kind: str, tmp_path: Path) -> None:
    words = (f"privacy.local.kind={kind}", "privacy.local.noise_multiplier=3")
    found = [run(tmp_path / engine, f"engine={engine}", *words) for engine in ("one_by_one", "batched")]
    one, many = ([(row["accuracy"], row["accuracy_error"]) for row in each.read_metrics()] for each in found)
    assert one == many
    # Noise of standard deviation 2 * 2 on a number in -1..1, twice as wide as an accuracy; for Laplace sqrt(2).
    wide = 4 / 2 / math.sqrt(40) * (1 if kind == "gaussian" else math.sqrt(2))
    assert one[-1][1] == pytest.approx(wide, rel=1e-6)
    charged = [sorted(DurableLedger(each.clients_ledger_path).spent(LOCAL, holder="7").entries) for each in found]
    assert charged[0] == charged[1]
    assert sorted(count for _, count in charged[0]) == [2, 3]  # two answers, three updates


def test_the_total_is_spent_by_updates_and_answers_together_and_is_what_is_published(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "privacy.local.kind=laplace", "privacy.local.epsilon=5")
    spent = DurableLedger(folder.clients_ledger_path).spent(LOCAL, holder="7")
    assert pure_epsilon(spent.entries) == pytest.approx(5, rel=1e-9)
    stated = json.loads((folder.path / "privacy.json").read_text())["guarantees"][2]
    assert stated["epsilon"]["pure"] == pytest.approx(5, rel=1e-9)
    assert "the client rates the model every 2 rounds and at the end" in stated["mechanism"]
    assert folder.read_metrics()[-1]["epsilon_local"] == pytest.approx(stated["epsilon"]["pld"], rel=1e-9)
