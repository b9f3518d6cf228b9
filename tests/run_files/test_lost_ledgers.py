"""A ledger that was lost, turned back, replaced, copied or damaged is an error, never a new
account."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from flwr.app import Context, RecordDict

from discreet.flower import serving
from discreet.ledger import durable_ledger, rollback_guard
from discreet.ledger.charges import LedgerPosition
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.ledger.event_sums import ROWS_ADDED_UP
from discreet.ledger.rollback_guard import STATE_VARIABLE, RollbackGuard
from discreet.node.nodes import node_client
from discreet.node.work import work_of
from discreet.planning.plan import planned
from discreet.protocol import run_end
from discreet.run_files import run_folder
from discreet.run_files.call import Call
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder, state_of
from discreet.run_files.run_ledgers import check_ledgers
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate
from tests.command import ledger as ledger_command
from tests.command import simulate as simulate_command
from tests.node.clients import EXAMPLE, config, request

SMALL = (
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "sampling.kind=everyone",
    "privacy.user.noise_multiplier=4",
    "privacy.example.enabled=true",
    "privacy.example.noise_multiplier=4",
)
NODE = {"partition-id": 1, "num-partitions": 4}
RUN = config(*EXAMPLE, "data.name=digits", "data.num_clients=4", "model.name=logistic_regression")
FILES = ("ledger.db", "clients.db")


@lru_cache
def small() -> Settings:
    return load_config(SMALL)


def train(folder: Path, rounds: int, *, resume: bool) -> None:
    simulate(replace(small(), rounds=rounds), Call(str(folder), resume))


def one_more(path: Path) -> None:
    DurableLedger(path).charge([Charge(1, "example", "", GaussianDpEvent(2.0))])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run` after two rounds, `older` after its first one, and `other`, another run with the same
    settings."""
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
    return checkpoint.round


def charges_of(ledger: Path) -> int:
    """By the node that has it."""
    accounts = node_client(work_of(request(RUN)), NODE | {"ledger": str(ledger)}).accounts
    return len(accounts.ledger.releases())


def rebuilt(path: Path) -> None:
    """Without its last rows, and whole again."""
    with closing(sqlite3.connect(path)) as ledger, ledger:
        first = "select nonce from releases where number = 1"
        ledger.execute(f"delete from releases where nonce != ({first})")
        rows, digest = ledger.execute("select max(number), digest from releases").fetchone()
        ledger.execute("update facts set value = ? where name = 'head'", (digest,))
        ledger.execute("update facts set value = ? where name = 'rows'", (str(rows),))
        ledger.execute("delete from sums")
        ledger.execute(f"insert into sums {ROWS_ADDED_UP}")
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
def test_a_run_is_not_resumed_without_all_that_it_spent(
    way: str, file: str, runs: Path, tmp_path: Path
) -> None:
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
    with pytest.raises(LedgerError, match="another copy of it"):
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
    with pytest.raises(LedgerError, match="never charged"):
        check_ledgers(RunFolder(folder), planned(small()), simulated=True)
    WAYS[way](folder / file, runs)
    assert ledger_command(["adopt", str(folder)]) == 0
    with pytest.raises(
        LedgerError,
        match=f"{file} is older than the checkpoint",
    ):
        check_ledgers(RunFolder(folder), planned(small()), simulated=True)


@pytest.fixture
def turned_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose ledger is that of its first round again when its second one was charged."""
    folder = tmp_path / "run"
    train(folder, 1, resume=False)
    older = copied(folder, tmp_path / "older") / "ledger.db"
    append = RunFolder.append_metrics

    def appended(self: RunFolder, row: Any) -> None:
        shutil.copy(older, self.ledger_path)
        append(self, row)

    monkeypatch.setattr(RunFolder, "append_metrics", appended)
    return folder


def test_a_run_whose_ledger_was_turned_back_says_no_epsilon(turned_back: Path) -> None:
    before = (turned_back / "privacy.json").read_text()
    with pytest.raises(LedgerError, match="is an older copy"):
        train(turned_back, 2, resume=True)
    assert (turned_back / "privacy.json").read_text() == before


def test_a_checkpoint_knows_the_charged_ledger_not_one_put_in_its_place(
    turned_back: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LedgerError):
        train(turned_back, 2, resume=True)
    monkeypatch.setenv(STATE_VARIABLE, str(turned_back.parent / "another machine"))
    assert ledger_command(["adopt", str(turned_back)]) == 0
    with pytest.raises(LedgerError, match="is older than the checkpoint"):
        check_ledgers(RunFolder(turned_back), planned(small()), simulated=True)


def test_a_ledger_that_was_turned_back_can_not_be_adopted(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(node.parent.parent / "older" / "ledger.db", node)
    assert ledger_command(["adopt", str(node)]) == 2
    assert "is an older copy" in capsys.readouterr().err


def test_a_ledger_that_was_moved_goes_on_where_its_owner_says_so(node: Path) -> None:
    other = node.parent.parent / "other" / "ledger.db"
    node.unlink()
    other.rename(node)
    with pytest.raises(LedgerError, match=r"not the ledger .*charged there before"):
        charges_of(node)
    assert ledger_command(["adopt", str(node)]) == 0
    assert charges_of(node) == 1


def test_two_copies_that_are_charged_at_the_same_moment_do_not_both_go_on(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, note = copied(node.parent, node.parent.parent / "copy") / "ledger.db", RollbackGuard.note

    def late(
        guard: RollbackGuard, position: LedgerPosition, path: Path, *, since: LedgerPosition
    ) -> bool:
        monkeypatch.setattr(RollbackGuard, "note", note)
        one_more(node)
        return note(guard, position, path, since=since)

    monkeypatch.setattr(RollbackGuard, "note", late)
    with pytest.raises(LedgerError, match="another copy of it"):
        one_more(copy)
    assert charges_of(node) == 3


def test_processes_that_charge_one_file_at_the_same_moment_leave_nothing_unknown(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = RollbackGuard.note

    def faster(
        guard: RollbackGuard, position: LedgerPosition, path: Path, *, since: LedgerPosition
    ) -> bool:
        # The other one noted the row before this one, after this one had looked.
        monkeypatch.setattr(RollbackGuard, "note", note)
        before = LedgerPosition(position.identity, 3, str(DurableLedger(path).releases()[2].digest))
        note(guard, before, path, since=since)
        return note(guard, position, path, since=since)

    monkeypatch.setattr(RollbackGuard, "note", faster)
    DurableLedger(node).charge([Charge(1, "example", "", GaussianDpEvent(2.0))] * 2)
    with RollbackGuard.opened() as guard:
        assert (
            guard.recall(DurableLedger(node).position().identity) == DurableLedger(node).position()
        )


def test_without_a_folder_for_what_is_known_nothing_is_charged(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(node))
    with pytest.raises(LedgerError, match=f"{STATE_VARIABLE} names another folder"):
        one_more(node)
    assert len(DurableLedger(node).releases()) == 2


THREE_ROUNDS = (
    "data.num_clients=5",
    "privacy.delta=0.01",
    "model.name=logistic_regression",
    "rounds=3",
    "seed=40127",
    "privacy.user.noise_multiplier=0.5",
    "privacy.user.max_epsilon=1e6",
)
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/the/disk")


class Full(sqlite3.Connection):
    """A database that has no room for a second charge."""

    def executemany(self, statement: str, *words: object) -> sqlite3.Cursor:
        if "releases" in statement and self.execute("select count(*) from releases").fetchone()[0]:
            self.execute(
                f"pragma max_page_count = {self.execute('pragma page_count').fetchone()[0]}"
            )
            self.execute("insert into facts values ('long', ?)", ("x" * 10**6,))
        return super().executemany(statement, *words)  # type: ignore[arg-type]


def no_room_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    replace, seen = run_folder.replace_file, list[str]()

    def replace_until_full(path: Path, content: bytes, **how: Any) -> None:
        seen.append(path.name)
        if seen.count("state.safetensors") > 1:
            raise FULL
        replace(path, content, **how)

    import_module("discreet.cli.sweep")  # what it has of the name is not to be this one for good
    monkeypatch.setattr(run_folder, "replace_file", replace_until_full)


def no_room_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Full))


@pytest.mark.parametrize("no_room", [no_room_for_a_checkpoint, no_room_in_the_ledger])
def test_a_run_on_a_full_disk_says_in_one_line_how_it_goes_on_and_goes_on_so(
    no_room: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as until_room:
        no_room(until_room)
        with pytest.raises(SystemExit) as ended:
            simulate_command([*THREE_ROUNDS, f"output_dir={folder.path}"])
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (1, "")
    reason, _, command = said.out.splitlines()[-1].partition("; to resume: discreet simulate ")
    assert reason.startswith("interrupted after round 1 (")
    if no_room is no_room_in_the_ledger:
        assert reason.endswith("disk is full. Make room on its disk, if it is full)")
    else:
        assert os.strerror(errno.ENOSPC) in reason
    assert simulate_command(shlex.split(command)) == 0
    assert [row["round"] for row in folder.read_metrics()] == [1, 2, 3]
    assert state_of(folder) == "finished"


def test_a_server_app_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object, **__: object) -> None:
        raise FULL

    def leave(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(serving, "run", run)
    monkeypatch.setattr(run_end, "flwr_exit", leave)
    monkeypatch.setattr(serving, "config_of", lambda *_, **__: load_asked(()))
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(SystemExit):
        serving.serve(object(), context, strategy=None)  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"discreet: {FULL}\n"


@pytest.mark.parametrize("place", ["the rollback guard", "the folder", "the first look"])
def test_a_ledger_that_can_not_be_made_leaves_no_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise FULL

    folder = tmp_path / "made"
    if place == "the rollback guard":
        (tmp_path / "file").touch()
        monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "file"))
    elif place == "the folder":
        monkeypatch.setattr(durable_ledger, "flush_to_disk", no_room)
    else:
        monkeypatch.setattr(DurableLedger, "_settings", lambda _: no_room())
    with pytest.raises((LedgerError, OSError)):
        DurableLedger.create(folder / "ledger.db")
    assert list(folder.iterdir()) == []
    monkeypatch.undo()
    assert DurableLedger.create(folder / "ledger.db").verify() == []


def test_a_new_ledger_is_whole_without_what_sqlite_keeps_beside_it(tmp_path: Path) -> None:
    # On a full disk SQLite gives up, without a word, copying its log into the file at the end, as
    # if another read it.
    connect, readers = sqlite3.connect, list[sqlite3.Connection]()

    class Read(sqlite3.Connection):
        def close(self) -> None:
            readers.append(connect(self.execute("pragma database_list").fetchone()[2]))
            readers[-1].execute("select count(*) from sqlite_schema")
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(connect, factory=Read))
        rollback_guard.make_database(tmp_path / "new.db", durable_ledger.SCHEMA)
    with closing(connect(tmp_path / "new.db")) as connection, closing(readers[0]):
        assert connection.execute("select count(*) from releases").fetchone() == (0,)


@pytest.mark.parametrize(
    "change", ["event = cast(event as blob)", "event = 'gaussian'", "count = 0.5", "round = x'01'"]
)
def test_a_value_that_is_none_of_its_column_is_an_error_of_the_ledger(
    change: str, tmp_path: Path
) -> None:
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    ledger.charge([Charge(1, "user", "", GaussianDpEvent(1.0))])
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute(f"update releases set {change}")
        if "round" not in change:
            connection.execute(f"update sums set {change}")
    with pytest.raises(LedgerError, match=f"{ledger.path} .*is damaged"):
        _ = ledger.check() if "round" in change else ledger.spent("user")


def test_what_this_machine_knows_of_ledgers_may_be_damaged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "known"))
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    with closing(sqlite3.connect(tmp_path / "known" / "ledgers.db")) as connection, connection:
        connection.execute("update ledgers set rows = 'few'")
    with pytest.raises(LedgerError, match=r"ledgers\.db.* it is damaged, rows is of type str"):
        ledger.charge([Charge(1, "user", "", GaussianDpEvent(1.0))])
