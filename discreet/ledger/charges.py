"""What is said of a ledger by those who do not open its file: charges, positions, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class LedgerError(ValueError):
    """A ledger file is missing, damaged, older than it was, or belongs to another run."""


class LedgerDiskError(LedgerError, OSError):
    """The disk under a ledger is full or fails. The ledger itself is intact, and usable again when
    the disk is."""


@dataclass(frozen=True)
class Charge:
    """A release to be charged: `count` times `event` on the data of `data_owner`, in `round`."""

    round: int
    guarantee: str
    data_owner: str
    event: DpEvent
    count: int = 1


@dataclass(frozen=True)
class LedgerPosition:
    """A position in a ledger: its identity, its number of rows, and the digest of the last one."""

    identity: str
    rows: int
    head: str
