"""`DPFedAvg(account=...)`: another app's runs over the same nodes have one account too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import noised, run, status_of


@pytest.fixture
def account(tmp_path: Path) -> str:
    create_account(tmp_path / "nodes.db", Population("nodes", 10, ADJACENCIES[0], 1e-3))
    return str(tmp_path / "nodes.db")


def test_the_second_run_is_ended_by_what_the_first_one_spent(account: str, tmp_path: Path) -> None:
    given = {"seed": None, "account": account, "population_name": "nodes", "fraction_train": 0.5}
    run(tmp_path / "first", num_rounds=2, **given)
    (spent,) = DurableLedger(Path(account)).sums()
    assert spent.times == 2
    at_most = json.loads((tmp_path / "first" / "privacy.json").read_text())["account"]["epsilon"]["pld"]
    run(tmp_path / "second", num_rounds=2, **noised(max_epsilon=at_most), **given)
    assert "over all runs on nodes, beyond max_epsilon=" in str(status_of(tmp_path / "second").reason)
    assert DurableLedger(Path(account)).sums() == [spent]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"population_size": 11}, "population_size does not fit account="),
        ({"population_name": "others"}, "population_name does not fit account="),
        (noised(delta=1e-4), "delta does not fit account="),
        ({"population_name": None}, "population_name must be given with account"),
        ({"account": "nowhere.db"}, "account=.* is missing"),
        ({"seed": 70123}, "seed must be null with account"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_argument(
    changed: dict[str, object], said: str, account: str, tmp_path: Path
) -> None:
    given: dict[str, object] = {"seed": None, "account": account, "population_name": "nodes", **changed}
    with pytest.raises((ConfigError, LedgerError), match=said):
        run(tmp_path / "first", num_rounds=1, **given)
