"""A copy of a ledger that is in use."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.run_files.whole_files import new_file


def copy_ledger(ledger: Path, copy: Path) -> DurableLedger:
    """Makes a complete and verified copy of a ledger. A plain copy of the file may miss rows in
    SQLite's side files.

    Raises:
      LedgerError: there is no ledger, the copy would overwrite a file, or the chain is broken.
    """
    try:
        ledger.stat()  # raises if it is missing
        with new_file(copy) as beside:
            with (
                DurableLedger(ledger).reading() as source,
                closing(sqlite3.connect(beside)) as target,
            ):
                source.backup(target)
            if faults := DurableLedger(beside).verify():
                raise LedgerError(f"{ledger} is damaged: {faults[0]}")
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(
            f"{ledger} can't be copied, and nothing is overwritten: {error}"
        ) from error
    return DurableLedger(copy)
