"""The owners of rows, as a loop names them, and the rows of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from discreet.data.empty_cells import is_empty
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.dpsgd.poisson_batches import ExampleReader
from discreet.privacy.owner_rows import OwnerRows, owner_rows
from discreet.privacy.person import LARGEST_EXACT, SPELLINGS, OtherSpelling, person_keys

ROWS_PER_OWNER = 8


def named_owners(owners: Sequence[object] | Tensor) -> Sequence[object]:
    """The owner of each row: a number, or the key of a text. Raises ValueError if a row has no
    owner, owners are of several kinds, or one may be written in two ways: one person would then be
    protected as two."""
    listed = owners.tolist() if isinstance(owners, Tensor) else list(owners)
    missing = [row for row, owner in enumerate(listed) if is_empty(owner)]
    if missing:
        raise ValueError(
            f"owners: {len(missing)} rows have no owner, the first of them row {missing[0]}: leave "
            "such rows out, or name their owners"
        )
    kinds = {_kind(owner) for owner in listed}
    if len(kinds) > 1:
        raise ValueError(
            "owners must be all texts or all whole numbers, of one kind: 7, 7.0, True and '7' may "
            "be one person"
        )
    if kinds != {str}:
        return listed
    try:
        return person_keys(listed)
    except OtherSpelling as error:
        raise ValueError(
            f"owners: rows {error.before} and {error.row} write an owner in two ways, which differ "
            f"only by {SPELLINGS}. Write each person in one way"
        ) from error


def _kind(owner: object) -> type:
    """The kind of an owner. ValueError: it is none, or a number that has lost its last digits."""
    if isinstance(owner, float | np.floating) and abs(float(owner)) >= LARGEST_EXACT:
        raise ValueError("owners: a float has no room for so many digits: give texts")
    for kind in (bool, np.bool_, str, int, np.integer, float, np.floating):
        if isinstance(owner, kind):
            return kind
    raise ValueError(f"owners must be texts or whole numbers (got {type(owner).__name__})")


def rows_by_owner(
    owners: Sequence[object], examples: ExampleReader, privacy: LoopPrivacy
) -> OwnerRows:
    """The rows of each owner of a data set. Raises ValueError: the numbers of owners and rows
    differ, or an option would separate rows from their owners."""
    if examples.collate is not None:
        raise ValueError(
            "owners: a collate_fn may bring rows into another order: give a data set of finished "
            "rows"
        )
    rows = privacy.rows_per_owner or ROWS_PER_OWNER
    most = privacy.max_physical_batch
    if most is not None and most < rows:
        raise ValueError(f"max_physical_batch must be at least rows_per_owner, {rows}, not {most}")
    return owner_rows(owners, len(examples), rows)
