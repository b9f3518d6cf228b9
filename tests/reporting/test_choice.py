"""What choosing among runs costs: their spending adds up only over the same data, unit and
adjacency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.ledger.durable_ledger import CLIENTS_LEDGER, Charge, DurableLedger
from discreet.reporting.page import report_of
from discreet.run_files.run_folder import RunFolder
from tests.made_runs import make_run

NOISE = "privacy.user.noise_multiplier=2"
NO_USERS = ("privacy.user.enabled=false", f"{NOISE.split('=')[0]}=null")
EXAMPLES = (*NO_USERS, "privacy.example.enabled=true", "privacy.example.noise_multiplier=1")
LOCAL = (*NO_USERS, "privacy.local.noise_multiplier=1", "privacy.delta=1e-3")
MASKED = ("sampling.kind=everyone", "privacy.accountant=rdp", "data.num_clients=20")
STEP = ("training.epochs=1", "privacy.example.clip_norm=1")
DEALT = "the runs deal the data differently"
UNITS = "the runs protect different units: "
ADJACENCIES = "the runs have different adjacencies: "


def made(path: Path, guarantee: str, *words: str, owners: Sequence[str] = ("0", "1")) -> RunFolder:
    """A run whose releases are on the data of these owners, each a Gaussian of noise 4; the noise
    of the user level is in the ledger already."""
    folder = make_run(path, *words)
    if guarantee != "user":
        ledger = path / (CLIENTS_LEDGER if any(owners) else "ledger.db")
        charges = [Charge(1, guarantee, owner, GaussianDpEvent(4.0)) for owner in owners]
        DurableLedger(ledger).charge(charges)
        rows = [row | {f"epsilon_{guarantee}": 1.0} for row in folder.read_metrics()]
        folder.replace_metrics(rows)
    return folder


def said_of(folder: Path, guarantee: str) -> str:
    costs = [each for each in report_of([folder]).costs if each.startswith(guarantee)]
    assert len(costs) == 1
    return costs[0]


DEALINGS = [
    ("data.partition=site data.site=hospital", "data.partition=site data.site=ward"),
    ("data.partition=iid", "data.partition=dirichlet"),
    ("data.partition=dirichlet data.alpha=1", "data.partition=dirichlet data.alpha=2"),
    ("data.partition_seed=1", "data.partition_seed=2"),
    ("data.num_clients=200", "data.num_clients=300"),
    ("data.path=one", "data.path=two"),
    ("data.name=digits", "data.name=mnist"),
    (
        "data.partition=sampled data.examples_per_client=4",
        "data.partition=sampled data.examples_per_client=5",
    ),
]
TOGETHER = [
    ("data.partition=iid data.alpha=1", "data.partition=iid data.alpha=2"),
    ("data.normalise=none", "data.normalise=private statistics.low=0 statistics.high=1"),
    ("data.public_num_examples=20", ""),
]


@pytest.mark.parametrize("dealings", DEALINGS, ids=lambda pair: pair[1])
def test_runs_that_deal_the_data_differently_do_not_add_up(
    dealings: tuple[str, str], tmp_path: Path
) -> None:
    for number, words in enumerate(dealings):
        made(tmp_path / str(number), "user", NOISE, *words.split())
    said = said_of(tmp_path, "user")
    assert "epsilon not stated for all 2 runs" in said
    assert DEALT in said


@pytest.mark.parametrize("dealings", TOGETHER, ids=lambda pair: pair[0])
def test_runs_over_the_same_clients_add_up(dealings: tuple[str, str], tmp_path: Path) -> None:
    for number, words in enumerate(dealings):
        made(tmp_path / str(number), "user", NOISE, *words.split())
    assert said_of(tmp_path, "user").endswith("; the runs add up")


@pytest.mark.parametrize("clients", [200, 300])
def test_a_run_without_a_round_is_compared_too(clients: int, tmp_path: Path) -> None:
    made(tmp_path / "run", "user", NOISE, "data.num_clients=200")
    killed = made(tmp_path / "killed", "user", NOISE, f"data.num_clients={clients}")
    killed.metrics_path.unlink()
    said = said_of(tmp_path, "user")
    assert "for the run and 1 without a round" in said
    assert ("epsilon not stated" in said) == (DEALT in said) == (clients == 300)


UNLIKE = [
    (
        "local",
        (*LOCAL, "privacy.local.kind=gaussian"),
        (*LOCAL, "privacy.local.kind=laplace_step", "training.epochs=1"),
        f"{UNITS}all data of one client; or one example of one client",
    ),
    (
        "example",
        EXAMPLES,
        (*EXAMPLES, "data.public_num_examples=40"),
        f"{ADJACENCIES}zero-out: one example contributes nothing, n stays; or add or remove one "
        "example",
    ),
    (
        "user",
        (NOISE, *MASKED),
        (NOISE, *MASKED, "privacy.user.aggregation=secure"),
        f"{ADJACENCIES}add or remove one client; or zero-out: one client's update",
    ),
    (
        "user",
        (NOISE, "sampling.kind=poisson"),
        (NOISE, "sampling.kind=fixed", "privacy.accountant=rdp"),
        f"{ADJACENCIES}add or remove one client; or replace one client",
    ),
]


@pytest.mark.parametrize(("guarantee", "first", "second", "why"), UNLIKE)
def test_guarantees_of_another_unit_or_adjacency_do_not_add_up(
    guarantee: str, first: Sequence[str], second: Sequence[str], why: str, tmp_path: Path
) -> None:
    for number, words in enumerate((first, second)):
        made(tmp_path / str(number), guarantee, *words)
    said = said_of(tmp_path, guarantee)
    assert "epsilon not stated for all 2 runs" in said
    assert why in said


def test_what_a_server_charges_for_all_is_spent_by_each_client(tmp_path: Path) -> None:
    declared = (*EXAMPLES, *MASKED, "data.public_num_examples=40")
    secure = (*EXAMPLES, *MASKED, "privacy.example.aggregation=secure", *STEP)
    made(tmp_path / "same" / "0", "example", *declared)
    made(tmp_path / "same" / "1", "example", *declared)
    made(tmp_path / "server" / "0", "example", *declared)
    made(tmp_path / "server" / "1", "example", *secure, owners=[""])
    said = said_of(tmp_path / "server", "example")
    assert said == said_of(tmp_path / "same", "example")
    assert said.endswith("add up")
