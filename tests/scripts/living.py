"""What tests ask that end a run early: which of its processes live, and what its files say."""

from __future__ import annotations

import signal

from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.run_folder import RunFolder, read_status
from discreet.processes import below, carrying

MARK = "DISCREET_TEST_MARK"


def marked(mark: str, *, program: str = "") -> list[int]:
    """The living processes of a mark, or those of them that run a program."""
    return sorted({*carrying(MARK, mark)} & {*below(0, program.encode())})


def default_signals() -> None:
    """As at a terminal, also where the tests themselves run in the background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def check_interrupted(folder: RunFolder, reason: str) -> int:
    """The last whole round of a run whose files say what they should after an interruption."""
    status, checkpoint = read_status(folder), folder.load_checkpoint()
    assert status is not None
    assert (status.state, status.reason) == ("interrupted", reason)
    assert checkpoint is not None
    ledger = DurableLedger(folder.ledger_path)
    assert ledger.verify() == []
    assert ledger.spent("user").num_releases - checkpoint.round in (0, 1)
    return checkpoint.round
