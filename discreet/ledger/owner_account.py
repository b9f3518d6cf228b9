"""The account of owners in a ledger file, separate from that of single examples.

An epsilon for single examples says nothing about an owner with several. Nor can the owner account
price a single row: if one row of an owner is zeroed out, the owner's clipped gradient moves by up
to twice the clip norm, but a zeroed-out owner is accounted for as a move of one clip norm.
"""

from __future__ import annotations

from collections.abc import Callable

from discreet.accounting.privacy_ledger import PrivacyLedger

BY_OWNER = " (each owner's rows as one)"  # suffix of the data owner's name
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
    """Raises ValueError if the account for the other unit has been charged. `spent` gives the
    ledger's spending of an account."""
    if spent(other_unit(account)).entries:
        units = ("single examples", "an owner")
        if not account.endswith(BY_OWNER):
            units = ("owners", "a single example")
        raise ValueError(BOTH.format(*units))
