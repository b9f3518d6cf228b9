"""A sweep over one account of a population: all its runs together are held to one budget."""

from __future__ import annotations

import json
from pathlib import Path

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.population_account import ADJACENCIES, Population, create_account
from tests.command import simulate as main

EVENT, BUDGET, DELTA, FIT = PoissonSampledDpEvent(0.3, GaussianDpEvent(2.0)), 1.0, 1e-3, 4
SMALL = (
    *("data.num_clients=20", "model.name=logistic_regression", "training.epochs=1", "rounds=2"),
    *("privacy.user.noise_multiplier=2", "sampling.probability=0.3", "privacy.user.too_noisy=warn"),
    *("sampling.population_name=people", f"privacy.user.max_epsilon={BUDGET}"),
)


def test_so_many_rounds_fit_by_dp_accounting() -> None:
    fits, too_many = (PLDAccountant().compose(EVENT, FIT + more).get_epsilon(DELTA) for more in (0, 1))
    assert fits <= BUDGET < too_many


def test_the_runs_of_a_sweep_spend_one_budget_together(tmp_path: Path) -> None:
    path, sweep = tmp_path / "people.db", tmp_path / "sweep"
    create_account(path, Population("people", 20, ADJACENCIES[0], DELTA))
    rates = "server.learning_rate=0.5,1,2"  # three runs of two rounds each, of which four have room
    main(["--multirun", *SMALL, rates, f"privacy.user.account={path}", f"hydra.sweep.dir={sweep}"])
    account = DurableLedger(path)
    charged = [account.spent("user", data_owner=run).entries for run in account.data_owners("user")]
    assert charged == [((EVENT, 2),), ((EVENT, FIT - 2),)]
    own = [DurableLedger(folder / "ledger.db").spent("user").num_releases for folder in sorted(sweep.glob("[0-9]"))]
    assert (len(own), sum(own)) == (3, FIT)
    said = [json.loads((sweep / str(number) / "privacy.json").read_text())["stopped"] for number in range(3)]
    stopped = [reason for reason in said if reason]
    assert stopped
    assert all("over all runs on people, beyond privacy.user.max_epsilon=1" in reason for reason in stopped)
