"""The sums of a ledger: charges do not take longer with its rows, and no spending is forgotten."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent

from discreet.accounting.events import event_to_json
from discreet.ledger import event_sums
from discreet.ledger.chain import row_digest
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.run_files.ledger_copy import copy_ledger

EVENTS = GaussianDpEvent(2.0), GaussianDpEvent(4.0), LaplaceDpEvent(0.5)
STEPS = 100  # of SQLite's virtual machine, between two calls of its progress handler


def charges(count: int) -> list[Charge]:
    return [Charge(number, "example", "", EVENTS[number % 3]) for number in range(count)]


@pytest.fixture
def ledger(tmp_path: Path) -> DurableLedger:
    made = DurableLedger.create(tmp_path / "ledger.db")
    made.charge(charges(6))
    made.charge([Charge(7, "local", "7", EVENTS[0], 5)])
    return made


def edit(ledger: DurableLedger, *statements: str) -> None:
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def admitted(ledger: DurableLedger) -> None:
    """What a node and a guard do with a ledger for each message."""
    ledger.check(all_rows=False)
    ledger.spent("example")
    ledger.charge(charges(1), since=ledger.position())
    ledger.charge(charges(1), allowed=lambda _: None)
    ledger.data_owners("example")
    ledger.total()


def steps_of(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of steps of SQLite's virtual machine, in hundreds."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1

    class Counted(sqlite3.Connection):
        def __init__(self, *words: object, **more: object) -> None:
            super().__init__(*words, **more)  # type: ignore[arg-type]
            self.set_progress_handler(tick, STEPS)

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Counted))
        work()
    return count


def test_a_message_takes_no_longer_after_many_rows(
    ledger: DurableLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = steps_of(partial(admitted, ledger), monkeypatch)
    ledger.charge(charges(5000))
    assert steps_of(partial(admitted, ledger), monkeypatch) <= before + 3
    assert steps_of(ledger.check, monkeypatch) > 100  # all rows are many steps


def test_the_sums_are_those_of_the_rows(ledger: DurableLedger) -> None:
    rows = Counter[tuple[str, str]]()
    for row in ledger.releases():
        rows[row.guarantee, row.event] += row.count
    found = {
        (name, event_to_json(event)): count
        for name, owner in (("example", ""), ("local", "7"))
        for event, count in ledger.spent(name, data_owner=owner).entries
    }
    assert found == rows
    assert ledger.total().entries == ((EVENTS[1], 2), (EVENTS[2], 2), (EVENTS[0], 7))


FORGERIES = {
    "a smaller count": "update sums set count = 1 where holder = '7'",
    "a lost sum": "delete from sums where holder = '7'",
    "an event with more noise": "update sums set event = replace(event, '2.0', '9.0')",
    "no sums": "delete from sums",
}


@pytest.mark.parametrize("statement", FORGERIES.values(), ids=FORGERIES.keys())
def test_sums_that_forget_spending_are_found_at_start_at_a_message_and_at_a_charge(
    statement: str, ledger: DurableLedger
) -> None:
    edit(ledger, statement)
    assert ledger.verify() == [event_sums.FORGED]
    for check in (ledger.check, partial(ledger.check, all_rows=False), ledger.total):
        with pytest.raises(LedgerError, match=event_sums.FORGED):
            check()
    with pytest.raises(LedgerError, match=event_sums.FORGED):
        ledger.charge(charges(1), allowed=lambda _: None)
    ledger.charge(charges(1))  # by a caller that did not ask
    assert ledger.verify() == [event_sums.FORGED]


def test_forged_sums_are_not_forgotten_with_the_mark_of_their_digest(ledger: DurableLedger) -> None:
    edit(ledger, "delete from sums", "update releases set nonce = substr(nonce, 1, 16)")
    with pytest.raises(LedgerError, match=r"row 1 .*the chain"):
        ledger.check(all_rows=False)


def test_sums_of_an_earlier_charge_are_found(ledger: DurableLedger, tmp_path: Path) -> None:
    edit(
        ledger, f"attach '{tmp_path / 'old.db'}' as old", "create table old.s as select * from sums"
    )
    ledger.charge(charges(3))
    edit(
        ledger,
        f"attach '{tmp_path / 'old.db'}' as old",
        "delete from sums",
        "insert into sums select * from old.s",
    )
    with pytest.raises(LedgerError, match=event_sums.FORGED):
        ledger.check(all_rows=False)


def older(ledger: DurableLedger) -> None:
    """As a version without sums would have written it, known to this machine at its new head."""
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("drop table sums")
        connection.execute("update releases set nonce = substr(nonce, 1, 16)")
        rows = connection.execute("select * from releases order by number").fetchall()
        settings = connection.execute("select * from facts where name = 'identity'").fetchall()
        head = row_digest("", settings)
        for *content, _ in rows:
            head = row_digest(head, content)
            connection.execute(
                "update releases set digest = ? where number = ?", (head, content[0])
            )
        connection.execute("update facts set value = ? where name = 'head'", (head,))


def test_a_ledger_without_sums_is_read_and_gets_them_at_its_next_charge(
    ledger: DurableLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ledger.total(), ledger.spent("local", data_owner="7"), ledger.data_owners("example")
    older(ledger)
    monkeypatch.setenv("DISCREET_STATE", str(tmp_path / "another machine"))
    ledger.adopt()
    ledger.check(all_rows=False)
    assert before == (
        ledger.total(),
        ledger.spent("local", data_owner="7"),
        ledger.data_owners("example"),
    )
    ledger.charge(charges(3))
    assert ledger.verify() == []
    with ledger.reading() as connection:
        assert event_sums.are_kept(connection)
    assert ledger.total().num_releases == before[0].num_releases + 3


READERS: dict[str, Callable[[DurableLedger], object]] = {
    "total": DurableLedger.total,
    "check": lambda ledger: ledger.check(all_rows=False),
    "check of all rows": DurableLedger.check,
    "verify": lambda ledger: ledger.whole(),
    "contains": lambda ledger: ledger.contains(ledger.position()),
    "spent": lambda ledger: ledger.spent("example"),
    "copy": lambda ledger: copy_ledger(ledger.path, ledger.path.with_name("copy.db")),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_charge_between_two_reads_of_a_reader_is_no_fault(
    reader: str, ledger: DurableLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process charges after each statement of the reader."""
    statements, by_others = 0, 0

    class Beside(sqlite3.Connection):
        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            nonlocal statements, by_others
            done = super().execute(statement, *values)
            if statement.lstrip().startswith("select"):
                statements += 1
                with monkeypatch.context() as plain:
                    plain.setattr(sqlite3, "connect", connect)
                    by_others += len(charges(2))
                    ledger.charge(charges(2))
            return done

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Beside))
    READERS[reader](ledger)
    monkeypatch.undo()
    assert statements > 0
    assert ledger.total().num_releases == 11 + by_others
