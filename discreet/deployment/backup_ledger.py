"""Copies a ledger while it is in use: `python -m discreet.deployment.backup_ledger LEDGER COPY`.

A plain copy of the file may miss what SQLite still keeps beside it. The copy's chain is verified, and the digest of its
last row printed: whoever keeps that digest can prove later that nothing before it was rewritten.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from discreet.ledger.durable_ledger import DurableLedger, LedgerError


def backup(ledger: Path, copy: Path) -> DurableLedger:
    """A whole and verified copy of a ledger, in a file that is made for it.

    Raises:
      LedgerError: there is no ledger, the copy would overwrite a file, or the chain does not hold.
    """
    try:
        ledger.stat()  # it is there
        copy.touch(mode=0o600, exist_ok=False)
        with closing(sqlite3.connect(ledger)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"{ledger} can't be copied, and nothing is overwritten: {error}") from error
    copied = DurableLedger(copy)
    if faults := copied.verify():
        raise LedgerError(f"{ledger} is damaged: {faults[0]}")
    return copied


def main(words: Sequence[str]) -> int:
    """Copies, and prints rows and head; exit code 2 if it can't."""
    parser = argparse.ArgumentParser(prog="python -m discreet.deployment.backup_ledger", description=__doc__)
    parser.add_argument("ledger", type=Path)
    parser.add_argument("copy", type=Path)
    given = parser.parse_args(words)
    try:
        copied = backup(given.ledger, given.copy)
    except LedgerError as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    print(f"{given.copy}: {len(copied.releases())} rows, head {copied.position().head}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
