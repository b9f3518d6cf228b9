"""One account over all runs on the same people: every run charges it, and no two pass its budget
together."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.budget import BudgetSpent, ServerBudget
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.run_files.call import Call
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.server.population_account import (
    ADJACENCIES,
    Population,
    PopulationAccount,
    create_account,
)
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate

EVENT = PoissonSampledDpEvent(0.3, GaussianDpEvent(2.0))
PEOPLE = Population("people", 20, ADJACENCIES[0], 1e-3)
SMALL = (
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "sampling.population_name=people",
    "privacy.user.noise_multiplier=2",
    "sampling.probability=0.3",
    "privacy.user.too_noisy=warn",
)
PROCESSES = 8
FIT = {0.7: 2, 1.0: 4, 1.5: 9}  # rounds of EVENT, at delta 1e-3, by dp_accounting.pld.PLDAccountant


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_account(tmp_path / "people.db", PEOPLE)
    return tmp_path / "people.db"


def run(path: Path, name: str, *words: str) -> Path:
    """Simulates a run that charges the account; its folder."""
    folder = path.parent / name
    simulate(*load_asked([*SMALL, f"privacy.user.account={path}", f"output_dir={folder}", *words]))
    return folder


def account(path: Path, *, budget: float | None = None, name: str = "run") -> PopulationAccount:
    """As a run sees it that has no folder."""
    opened = PopulationAccount(path, PEOPLE, ServerBudget(budget, PEOPLE.delta, "pld"))
    opened.run = name
    return opened


def one_more() -> Sequence[Charge]:
    return [Charge(1, "user", "", EVENT)]


@pytest.mark.parametrize("budget", FIT)
def test_the_pinned_numbers_are_those_of_dp_accounting(budget: float) -> None:
    fits, too_many = (PLDAccountant().compose(EVENT, FIT[budget] + more) for more in (0, 1))
    assert fits.get_epsilon(PEOPLE.delta) <= budget < too_many.get_epsilon(PEOPLE.delta)


def test_every_run_charges_it_and_its_own_ledger_says_what_it_cost_itself(path: Path) -> None:
    folders = [run(path, "first", "rounds=2"), run(path, "second", "rounds=3")]
    assert [
        DurableLedger(folder / "ledger.db").spent("user").num_releases for folder in folders
    ] == [2, 3]
    assert account(path).ledger.total().entries == ((EVENT, 5),)
    said = [json.loads((folder / "privacy.json").read_text()) for folder in folders]
    assert [facts["account"]["releases"] for facts in said] == [2, 5]
    assert [facts["guarantees"][0]["epsilon"]["pld"] for facts in said] == [
        pytest.approx(PrivacyLedger(((EVENT, count),)).epsilon(1e-3)) for count in (2, 3)
    ]
    together = PLDAccountant().compose(EVENT, 5).get_epsilon(1e-3)
    assert said[1]["account"]["epsilon"]["pld"] == pytest.approx(together, rel=1e-3)


def test_the_second_run_is_ended_by_what_the_first_one_spent(path: Path) -> None:
    run(path, "first", "rounds=3", "privacy.user.max_epsilon=1")
    folder = run(path, "second", "rounds=3", "privacy.user.max_epsilon=1")
    facts = json.loads((folder / "privacy.json").read_text())
    assert facts["rounds"] == FIT[1.0] - 3
    assert "on people, beyond privacy.user.max_epsilon=1" in facts["stopped"]
    assert (folder / "model.safetensors").exists()


def test_an_accounts_own_limit_holds_whatever_a_run_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "people.db"
    create_account(path, PEOPLE, max_epsilon=0.7)
    folder = run(path, "first", "rounds=9", "privacy.user.max_epsilon=100")
    facts = json.loads((folder / "privacy.json").read_text())
    assert facts["rounds"] == FIT[0.7]
    assert f"max_epsilon of {path}=0.7" in facts["stopped"]


def test_what_another_run_charged_since_the_look_ahead_is_seen_by_the_charge(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 0.5
    other, mine, look = (
        account(path, name="other"),
        account(path, budget=budget),
        PopulationAccount.require_room,
    )
    while PrivacyLedger(other.ledger.total().entries).record(EVENT, 2).epsilon(1e-3) <= budget:
        other.charge(one_more())

    def looked(self: PopulationAccount, charges: Sequence[Charge], what: str = "") -> None:
        look(self, charges, what)
        if self is mine:
            other.charge(one_more())  # takes the last room

    monkeypatch.setattr(PopulationAccount, "require_room", looked)
    before = other.ledger.total().num_releases
    with pytest.raises(BudgetSpent, match="would reach a user-level epsilon"):
        mine.charge(one_more())
    assert other.ledger.total().num_releases == before + 1


def _spend_all(path: Path, number: int) -> None:
    mine = account(path, budget=1.5, name=f"run {number}")
    try:
        while True:
            mine.charge(one_more())
    except BudgetSpent:
        return


def test_many_processes_that_spend_at_once_spend_the_budget_and_no_more(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_spend_all, args=(path, number)) for number in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert account(path).ledger.total().entries == ((EVENT, FIT[1.5]),)
    assert DurableLedger(path).verify() == []


def test_a_round_whose_room_was_taken_meanwhile_releases_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each look ahead comes too early
    monkeypatch.setattr(PopulationAccount, "require_room", lambda *_: None)
    folder = run(path, "first", "rounds=20", "privacy.user.max_epsilon=0.7")
    facts = json.loads((folder / "privacy.json").read_text())
    fit = FIT[0.7]
    assert facts["rounds"] == fit == DurableLedger(folder / "ledger.db").spent("user").num_releases
    assert account(path).ledger.total().num_releases == fit


OTHERS = {
    "sampling.population_name=others": "sampling.population_name does not fit",
    "sampling.population_size=30": "sampling.population_size does not fit",
    "sampling.kind=fixed": "sampling.kind does not fit .* add or remove one client there, and rep",
    "privacy.delta=1e-4": "privacy.delta does not fit .* 0.001 there, and 0.0001 in this run",
    "sampling.population_name=null": "sampling.population_name must be given with privacy.user.acc",
    "seed=90217": "seed must be omitted with privacy.user.account",
    "privacy.user.enabled=false": "privacy.user.enabled must be true with privacy.user.account",
    "privacy.user.account=' '": "privacy.user.account must be a file",
}


@pytest.mark.parametrize("word", OTHERS)
def test_another_population_is_refused_by_the_setting_that_differs(word: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=OTHERS[word]):
        run(path, "first", "privacy.accountant=rdp", word)
    assert not (path.parent / "first").exists()
    assert account(path).ledger.total().num_releases == 0


def test_what_can_not_be_an_account_is_refused(path: Path, tmp_path: Path) -> None:
    folder = run(path, "first", "rounds=1")
    with pytest.raises(ConfigError, match="ledger of a run"):
        run(folder / "ledger.db", "second", "rounds=1")
    for name, size, delta in (
        ("", 20, 1e-3),
        ("people", 0, 1e-3),
        ("people", 20, 0.05),
        ("people", 20, 0.0),
    ):
        with pytest.raises(ConfigError, match="population"):
            Population(name, size, ADJACENCIES[0], delta)
    for limit in (0.0, math.inf):
        with pytest.raises(ConfigError, match=r"max_epsilon .*above 0 and finite"):
            create_account(tmp_path / "other.db", PEOPLE, max_epsilon=limit)


def test_an_account_that_was_never_made_is_not_made_by_a_run(tmp_path: Path) -> None:
    path = tmp_path / "people.db"
    with pytest.raises(
        ConfigError,
        match=r"is missing: .* discreet ledger create .* --population 'people' --size 20",
    ):
        run(path, "first", "rounds=1")
    assert not path.exists()


def replace_by_new(path: Path, _: Path) -> None:
    path.unlink()
    create_account(path, PEOPLE)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "lost": lambda path, _: path.unlink(),
    "turned back": lambda path, older: shutil.copy(older, path),
    "replaced": replace_by_new,
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[:5000]),
}


def go_on(folder: Path, config: Settings, rounds: int) -> None:
    simulate(replace(config, rounds=rounds), Call(str(folder), resume=True))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_is_not_resumed_without_all_that_the_account_knew(damage: str, path: Path) -> None:
    older = path.with_name("older.db")
    folder = run(path, "first", "rounds=1")
    _checkpoint(path)
    shutil.copy(path, older)
    go_on(folder, RunFolder(folder).read_config(), 2)
    _checkpoint(path)
    DAMAGES[damage](path, older)
    with pytest.raises((LedgerError, ConfigError)):
        go_on(folder, RunFolder(folder).read_config(), 3)
    assert DurableLedger(folder / "ledger.db").spent("user").num_releases == 2


def _checkpoint(path: Path) -> None:
    """All is in the file itself, none in the log beside it, so that a copy of the file is whole."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")


def test_on_another_machine_the_checkpoint_tells_that_an_account_is_older(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(path, "first", "rounds=1")
    _checkpoint(path)
    shutil.copy(path, tmp_path / "older.db")
    account(path, name="other").charge(one_more())  # which the run's own ledger does not know
    go_on(folder, RunFolder(folder).read_config(), 2)
    monkeypatch.setenv("DISCREET_STATE", str(tmp_path / "elsewhere"))
    turned_back = tmp_path / "turned_back.db"
    shutil.copy(tmp_path / "older.db", turned_back)
    DurableLedger(turned_back).adopt()
    DurableLedger(folder / "ledger.db").adopt()
    mine = account(
        turned_back, name=f"{folder} {DurableLedger(folder / 'ledger.db').position().identity}"
    )
    mine.charge(one_more())  # as many of this run as its ledger has, but not what came between
    config = RunFolder(folder).read_config()
    user = replace(config.privacy.user, account=str(turned_back))
    with pytest.raises(LedgerError, match=r"lacks the spending of"):
        go_on(folder, replace(config, privacy=replace(config.privacy, user=user)), 3)


def test_a_run_that_has_no_checkpoint_keeps_its_account_too(path: Path) -> None:
    folder, other = run(path, "first", "rounds=1"), path.with_name("other.db")
    shutil.rmtree(folder / "checkpoint")  # as after kill -9 in the first round
    create_account(other, PEOPLE)
    with pytest.raises(LedgerError, match=r"lacks the spending of"):
        run(other, "first", "rounds=1", "resume=true")
