"""A step that all clients share, at example level under secure aggregation: its account, its budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from discreet.accounting.accounting import epsilon_spent
from discreet.ledger.durable_ledger import DurableLedger
from discreet.privacy.secure_grid import SecureCohort, example_secure_sum
from discreet.server.run_folder import RunFolder
from discreet.server.state import Outcome
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate

CLIENTS, ROUNDS, NOISE = 4, 3, 3.0
BASE = (
    *("sampling.kind=everyone", "privacy.accountant=rdp", f"data.num_clients={CLIENTS}", "model.name=linear"),
    *(f"rounds={ROUNDS}", "training.epochs=1", "training.batch_size=400", "training.learning_rate=0.5", "seed=55147"),
    *("privacy.user.enabled=false", "privacy.user.target_epsilon=null", "privacy.example.enabled=true"),
    "privacy.example.clip_norm=0.5",
)
SECURE = (*BASE, "privacy.example.aggregation=secure", "privacy.secure.dropouts=0")
NOISED = (*SECURE, f"privacy.example.noise_multiplier={NOISE}")


def run(folder: Path, *words: str) -> Outcome:
    return simulate(load_config([*words, f"output_dir={folder}"]))


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_without_noise_it_is_the_plain_step_of_clients_that_noise_nothing(tmp_path: Path, engine: str) -> None:
    nothing = ("privacy.example.noise_multiplier=0", f"engine={engine}")
    shared = run(tmp_path / "shared", *SECURE, *nothing).checkpoint.params
    plain = run(tmp_path / "plain", *BASE, *nothing).checkpoint.params
    assert torch.allclose(shared, plain, atol=2e-4)
    assert float(shared.norm()) > 0.1


def test_the_account_is_that_of_the_honest_clients_shares_by_renyi_divergence(tmp_path: Path) -> None:
    params = run(tmp_path, *NOISED).checkpoint.params.numel()
    expected = example_secure_sum(params, SecureCohort(CLIENTS, 3), noise_multiplier=NOISE, largest_sum=400).event_of()
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == ((expected, ROUNDS),)
    epsilon = epsilon_spent([(expected, ROUNDS)], delta=1e-3, accountant="rdp")
    assert RunFolder(tmp_path).read_metrics()[-1]["epsilon_example"] == pytest.approx(epsilon, rel=1e-9)
    said = json.loads((tmp_path / "privacy.json").read_text())["guarantees"][1]
    assert said["epsilon"] == {"rdp": pytest.approx(epsilon, rel=1e-9)}
    assert said["adjacency"] == "add or remove one example"
    assert "not the server" in said["trusted"]


def test_the_target_chooses_the_noise_and_is_the_budget_of_a_longer_run(tmp_path: Path) -> None:
    target = (*SECURE, "privacy.example.target_epsilon=2")
    run(tmp_path, *target)
    assert 1.99 < float(RunFolder(tmp_path).read_metrics()[-1]["epsilon_example"] or 0) <= 2.0
    longer = load_config([*NOISED, "privacy.example.max_epsilon=2", f"output_dir={tmp_path / 'budget'}", "rounds=50"])
    ended = simulate(longer)
    assert ended.stopped is not None
    assert "privacy.example.max_epsilon=2" in ended.stopped
    assert float(RunFolder(tmp_path / "budget").read_metrics()[-1]["epsilon_example"] or 0) <= 2.0


REFUSED = (
    ("training.epochs=2", "training.epochs must be 1 with privacy.example.aggregation=secure"),
    ("training.optimizer=adam", "training.optimizer must be sgd"),
    ("training.weight_decay=0.1", "training.weight_decay must be 0"),
    ("data.public_num_examples=400", "data.public_num_examples must be left out"),
    ("evaluation.kind=private", "evaluation.kind must be public or none"),
    ("sampling.kind=poisson", "sampling.kind must be everyone"),
    ("privacy.accountant=pld", "privacy.accountant must be rdp"),
    ("privacy.example.enabled=false", "privacy.example.aggregation must be plain"),
)


def test_what_would_not_be_one_plain_step_over_all_examples_is_refused(tmp_path: Path) -> None:
    for word, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            run(tmp_path, *NOISED, word)
