"""A ledger that was lost, turned back, replaced or copied is an error, never a new account."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.ledger.rollback_guard import STATE_VARIABLE, LedgerPosition, RollbackGuard
from discreet.node.nodes import node_client
from discreet.server.plan import planned
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate
from tests.command import ledger as ledger_command
from tests.node.clients import EXAMPLE, config, request

SMALL = (
    *("data.num_clients=20", "model.name=logistic_regression", "training.epochs=1", "sampling.kind=everyone"),
    *("privacy.user.noise_multiplier=4", "privacy.example.enabled=true", "privacy.example.noise_multiplier=4"),
)
NODE = {"partition-id": 1, "num-partitions": 4}
RUN = config(*EXAMPLE, "data.name=digits", "data.num_clients=4", "model.name=logistic_regression")
FILES = ("ledger.db", "clients.db")


@lru_cache
def small() -> Settings:
    return load_config(SMALL)


def train(folder: Path, rounds: int, *, resume: bool) -> None:
    simulate(replace(small(), rounds=rounds, output_dir=str(folder), resume=resume))


def one_more(path: Path) -> None:
    DurableLedger(path).charge([Charge(1, "example", "", GaussianDpEvent(2.0))])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run` after two rounds, `older` after its first one, and `other`, another run with the same settings."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "run", 1, resume=False)
    copied(folder / "run", folder / "older")
    train(folder / "run", 2, resume=True)
    train(folder / "other", 2, resume=False)
    return folder


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The ledger of a node after two charges, with `older` and `other` as for runs."""
    for name in ("run", "other"):
        one_more(DurableLedger.create(tmp_path / name / "ledger.db").path)
    copied(tmp_path / "run", tmp_path / "older")
    one_more(tmp_path / "run" / "ledger.db")
    return tmp_path / "run" / "ledger.db"


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def round_of(folder: Path) -> int:
    checkpoint = RunFolder(folder).load_checkpoint()
    assert checkpoint is not None
    return checkpoint.round


def charges_of(ledger: Path) -> int:
    """By the node that has it."""
    accounts = node_client(request(RUN), NODE | {"ledger": str(ledger)}).accounts
    assert accounts is not None
    return len(accounts.ledger.releases())


def rebuilt(path: Path) -> None:
    """Without its last rows, and whole again."""
    with closing(sqlite3.connect(path)) as ledger, ledger:
        ledger.execute("delete from releases where number > 1")
        ledger.execute("update facts set value = (select digest from releases) where name = 'head'")
        ledger.execute("update facts set value = '1' where name = 'rows'")
    assert DurableLedger(path).verify() == []


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "deleted": lambda path, _: path.unlink(),
    "an older copy": lambda path, others: shutil.copy(others / "older" / path.name, path),
    "torn": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path, _: path.write_bytes(b""),
    "of another run": lambda path, others: shutil.copy(others / "other" / path.name, path),
    "without its last rows": lambda path, _: rebuilt(path),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_not_resumed_without_all_that_it_spent(way: str, file: str, runs: Path, tmp_path: Path) -> None:
    folder = copied(runs / "run", tmp_path / "run")
    WAYS[way](folder / file, runs)
    with pytest.raises(LedgerError, match=file):
        train(folder, 3, resume=True)
    assert round_of(folder) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_node_does_not_work_without_all_that_it_spent(way: str, node: Path) -> None:
    assert charges_of(node) == 2
    WAYS[way](node, node.parent.parent)
    with pytest.raises(LedgerError, match=r"ledger\.db"):
        charges_of(node)


def test_a_run_folder_that_was_copied_is_not_resumed_twice(runs: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", 1, resume=False)
    copy = copied(tmp_path / "run", tmp_path / "copy")
    train(copy, 2, resume=True)
    with pytest.raises(LedgerError, match="another copy of it was charged"):
        train(tmp_path / "run", 2, resume=True)
    train(copy, 3, resume=True)
    assert (round_of(tmp_path / "run"), round_of(copy)) == (1, 3)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("way", ["an older copy", "of another run", "without its last rows"])
def test_on_another_machine_the_checkpoint_tells(
    way: str, file: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(runs / "run", tmp_path / "run")
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "another machine"))
    with pytest.raises(LedgerError, match="never charged on this machine"):
        RunFolder(folder).check_ledgers(planned(small()), simulated=True)
    WAYS[way](folder / file, runs)
    assert ledger_command(["adopt", str(folder)]) == 0
    with pytest.raises(LedgerError, match=f"{file} is older than the checkpoint beside it, or of another run"):
        RunFolder(folder).check_ledgers(planned(small()), simulated=True)


def test_a_ledger_that_was_turned_back_can_not_be_adopted(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(node.parent.parent / "older" / "ledger.db", node)
    assert ledger_command(["adopt", str(node)]) == 2
    assert "is an older copy" in capsys.readouterr().err


def test_a_ledger_that_was_moved_goes_on_where_its_owner_says_so(node: Path) -> None:
    other = node.parent.parent / "other" / "ledger.db"
    node.unlink()
    other.rename(node)
    with pytest.raises(LedgerError, match="is not the ledger that this machine charged there before"):
        charges_of(node)
    assert ledger_command(["adopt", str(node)]) == 0
    assert charges_of(node) == 1


def test_two_copies_that_are_charged_at_the_same_moment_do_not_both_go_on(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, note = copied(node.parent, node.parent.parent / "copy") / "ledger.db", RollbackGuard.note

    def late(guard: RollbackGuard, position: LedgerPosition, path: Path, *, since: LedgerPosition) -> bool:
        monkeypatch.setattr(RollbackGuard, "note", note)
        one_more(node)
        return note(guard, position, path, since=since)

    monkeypatch.setattr(RollbackGuard, "note", late)
    with pytest.raises(LedgerError, match="another copy of it was charged"):
        one_more(copy)
    assert charges_of(node) == 3


def test_processes_that_charge_one_file_at_the_same_moment_leave_nothing_unknown(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = RollbackGuard.note

    def faster(guard: RollbackGuard, position: LedgerPosition, path: Path, *, since: LedgerPosition) -> bool:
        # The other one noted the row before this one, after this one had looked.
        monkeypatch.setattr(RollbackGuard, "note", note)
        before = LedgerPosition(position.identity, 3, str(DurableLedger(path).releases()[2].digest))
        note(guard, before, path, since=since)
        return note(guard, position, path, since=since)

    monkeypatch.setattr(RollbackGuard, "note", faster)
    DurableLedger(node).charge([Charge(1, "example", "", GaussianDpEvent(2.0))] * 2)
    with RollbackGuard.opened() as guard:
        assert guard.recall(DurableLedger(node).position().identity) == DurableLedger(node).position()


def test_without_a_folder_for_what_is_known_nothing_is_charged(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(node))
    with pytest.raises(LedgerError, match=f"{STATE_VARIABLE} names another folder"):
        one_more(node)
    assert len(DurableLedger(node).releases()) == 2
