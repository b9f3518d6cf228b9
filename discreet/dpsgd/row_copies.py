"""A warning about rows of tensors that may be copies of others. The watch over a data set can't see
copies, since each has memory of its own."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from discreet.privacy.repeated_rows import repeated_rows

_MOST_NUMBERS = 2**28  # in the inputs; to look at more takes seconds
_log = logging.getLogger("discreet")


def say_copies(tensors: Sequence[Tensor]) -> None:
    """Logs a warning if rows seem to be copies, in all tensors. Only float inputs are looked at:
    texts of a few words may well be equal."""
    inputs = tensors[0]
    are_plain = all(part.layout == torch.strided for part in tensors)
    if not are_plain or not inputs.is_floating_point() or not 0 < inputs.numel() <= _MOST_NUMBERS:
        return
    flat = inputs.detach().cpu().reshape(len(inputs), -1)
    halves = [_hashes(flat[:, ::2]), _hashes(flat[:, 1::2])]
    for part in tensors[1:]:
        halves[0] = list(zip(halves[0], _hashes(part), strict=True))
    found = repeated_rows(*halves)
    if found is not None:
        _log.warning(
            "dataset: examples %d and %d are equal, and %d in all repeat an earlier one. If they "
            "are copies (oversampling), a person counts several times in a sum: take them out, or "
            "name who owns each (owners=)",
            *found,
        )


def _hashes(values: Tensor) -> list[Hashable]:
    """A number for the values of each row, in which all its bytes count."""
    rows = values.detach().cpu().reshape(len(values), -1)
    # A copy, since one column of several has no rows of bytes.
    as_bytes = rows.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
    return [hash(row.tobytes()) for row in as_bytes]
