"""`discreet status`: what a run's population has spent stands beside what the run has spent."""

from __future__ import annotations

from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.cli.status import status_facts, status_lines
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.server.population_account import ADJACENCIES, Population, create_account
from tests.made_runs import make_run

WORDS = ("data.num_clients=20", "privacy.user.noise_multiplier=4", "sampling.kind=everyone")


def test_the_account_is_shown_with_what_is_left_of_it(tmp_path: Path) -> None:
    path = tmp_path / "people.db"
    create_account(path, Population("people", 20, ADJACENCIES[0], 1e-3))
    DurableLedger(path).charge([Charge(1, "user", "a run 12ab", GaussianDpEvent(4.0), 3)])
    words = (f"privacy.user.account={path}", "sampling.population_name=people", "privacy.user.max_epsilon=4")
    folder = make_run(tmp_path / "run", *WORDS, *words)
    spent = PrivacyLedger(((GaussianDpEvent(4.0), 3),)).epsilon(1e-3)
    facts = status_facts(folder)["account"]
    assert isinstance(facts, dict)
    assert (facts["runs"], facts["spent"], facts["left"]) == (1, pytest.approx(spent), pytest.approx(4 - spent))
    (line,) = (line for line in status_lines(folder) if line.startswith("account"))
    assert line == f"account    all runs on people (1) {spent:.4g} spent, {4 - spent:.4g} of 4 left"
    assert any(line.endswith("spent; its budget is that of all runs") for line in status_lines(folder))
    without = make_run(tmp_path / "without", *WORDS)
    assert status_facts(without)["account"] is None
    assert not any(line.startswith("account") for line in status_lines(without))
