"""The numbers of a checkpoint as the text beside its tensors, with a digest of that text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from discreet.ledger.rollback_guard import LedgerError, LedgerPosition
from discreet.planning.state import State
from discreet.settings.privacy import EXAMPLE, LOCAL

if TYPE_CHECKING:
    from torch import Tensor

TENSORS = ("params", "velocity", "second_moment")
TEXTS = ("state", "ledgers")
DIGEST = "digest"

Positions = Mapping[str, LedgerPosition]


def parts_of_state(state: State, positions: Positions) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state by name, and its numbers and the positions of the run's ledgers, as a
    file of tensors keeps them. What a mechanism carries is a secret, and not among them."""
    numbers = dict(vars(state))
    del numbers["carried"]
    tensors: dict[str, Tensor] = {}
    for name in TENSORS:
        tensors[name] = numbers.pop(name)
    ledgers = json.dumps(dict(positions), default=dataclasses.astuple)
    metadata = {"state": json.dumps(numbers), "ledgers": ledgers}
    metadata[DIGEST] = _digest(metadata)
    return tensors, metadata


def numbers_in(
    path: Path, metadata: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, LedgerPosition]]:
    """The numbers of the state, and the positions, in the metadata of a checkpoint at `path`;
    earlier versions wrote no digest. LedgerError: a character was changed."""
    try:
        if not {*TEXTS} <= metadata.keys() <= {*TEXTS, DIGEST}:
            raise ValueError("it has other entries than a checkpoint")
        if metadata.get(DIGEST, _digest(metadata)) != _digest(metadata):
            raise ValueError("its numbers were changed")
        positions = json.loads(metadata["ledgers"]).items()
        numbers = dict(json.loads(metadata["state"]))
        return numbers, {name: LedgerPosition(*position) for name, position in positions}
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise LedgerError(f"{path} is damaged: {error}") from error


def reported_epsilons(numbers: Mapping[str, Any]) -> dict[str, float]:
    """The largest epsilons that clients reported, by guarantee, as `State.largest_reported` gives
    them."""
    found = {name: float(numbers.get(f"epsilon_{name}", 0)) for name in (EXAMPLE, LOCAL)}
    if numbers.get("unaccounted"):
        return {name: value or math.inf for name, value in found.items()}
    return found


def _digest(metadata: Mapping[str, str]) -> str:
    text = f"{metadata['state']}\n{metadata['ledgers']}"
    return hashlib.sha256(text.encode()).hexdigest()
