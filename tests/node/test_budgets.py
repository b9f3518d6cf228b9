"""Clients whose own budget is spent stay out; the server goes on with the others, until nobody is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.run_folder import RunFolder
from discreet.server.state import Outcome
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

CLIENTS = 6
SMALL = [f"data.num_clients={CLIENTS}", "model.name=logistic_regression", "training.epochs=1", "seed=30911"]
SMALL += ["privacy.user.enabled=false", "training.batch_size=64", "sampling.kind=everyone", "rounds=9"]

# In shards of unlike size the clients' steps differ in number and probability, so their budgets last unequally long.
UNEQUAL = ["data.partition=dirichlet", "data.alpha=0.3"]
EXAMPLE = [*SMALL, *UNEQUAL, "privacy.example.enabled=true", "privacy.example.noise_multiplier=1.5"]
EXAMPLE += ["privacy.accountant=rdp", "privacy.example.max_epsilon=4"]
LOCAL = [*SMALL, "privacy.local.noise_multiplier=4", "privacy.local.max_epsilon=1"]


def run(folder: Path, *words: str) -> Outcome:
    return simulate(load_config([*words, f"output_dir={folder}"]))


def rounds_of(folder: Path, guarantee: str) -> dict[str, int]:
    """How many rounds each client took part in."""
    return dict(
        Counter(row.data_owner for row in DurableLedger(folder / "clients.db").releases() if row.guarantee == guarantee)
    )


def test_clients_whose_example_level_budget_is_spent_stay_out_and_the_others_go_on(tmp_path: Path) -> None:
    run(tmp_path / "run", *EXAMPLE)
    replies = [row["replies"] or 0 for row in RunFolder(tmp_path / "run").read_metrics()]
    assert replies[0] == CLIENTS
    assert len(set(replies)) > 2  # some went before others
    assert replies == sorted(replies, reverse=True)  # and who is out stays out
    ledger = DurableLedger(tmp_path / "run" / "clients.db")
    for client in rounds_of(tmp_path / "run", "example"):
        assert ledger.spent("example", data_owner=client).epsilon(1e-3, "rdp") <= 4


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_a_cohort_that_refuses_does_not_end_the_run_while_others_have_budget(kind: str, tmp_path: Path) -> None:
    words = ["sampling.kind=poisson", "sampling.probability=0.2", "rounds=60", "training.batch_size=512"]
    words += ["server.learning_rate=0.001"]  # or the noise of few clients would drive the model, and end the run first
    outcome = run(tmp_path / "run", *LOCAL, *words, f"privacy.local.kind={kind}")
    rounds = rounds_of(tmp_path / "run", "local")
    # With single clients in a cohort, a round in which all that were asked refuse comes long before the last.
    idle = [row["round"] for row in RunFolder(tmp_path / "run").read_metrics() if row["cohort"] and not row["replies"]]
    assert len(idle) > 1
    assert set(rounds) == {str(client) for client in range(CLIENTS)}
    assert len(set(rounds.values())) == 1  # everybody spent what it had
    assert outcome.checkpoint.round < 60
    assert outcome.stopped is not None
