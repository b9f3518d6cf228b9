"""The account of owners in a ledger file, apart from that of single examples.

An epsilon of single examples says nothing of an owner with several. The reverse has no price
either: if one row of an owner is zeroed out, the owner's clipped gradient moves by up to twice the
clip norm, and what a zeroed-out owner costs is accounted for a move of once.
"""

from __future__ import annotations

from collections.abc import Callable

from discreet.accounting.privacy_ledger import PrivacyLedger

BY_OWNER = " (each owner's rows as one)"  # after the name of whose data they are
BOTH = (
    "was charged for {}: no epsilon of {} follows from that. Give the unit from the first run on, "
    "or take another ledger for other data"
)


def account_name(data_owner: str, *, by_owner: bool) -> str:
    """The account of examples, or of owners, in a ledger file."""
    if by_owner:
        return data_owner + BY_OWNER
    return data_owner


def other_unit(account: str) -> str:
    """The account of the same data for the other unit."""
    if account.endswith(BY_OWNER):
        return account.removesuffix(BY_OWNER)
    return account + BY_OWNER


def check_unit(account: str, spent: Callable[[str], PrivacyLedger]) -> None:
    """Raises ValueError if the account for the other unit has been charged. `spent`: of an account,
    as the ledger knows it."""
    if spent(other_unit(account)).entries:
        units = ("single examples", "an owner")
        if not account.endswith(BY_OWNER):
            units = ("owners", "a single example")
        raise ValueError(BOTH.format(*units))
