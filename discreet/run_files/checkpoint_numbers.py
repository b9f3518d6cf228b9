"""The numbers of a checkpoint as the text beside its tensors, with a digest of that text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discreet.ledger.rollback_guard import LedgerError, LedgerPosition
from discreet.planning.state import State
from discreet.settings.privacy import EXAMPLE, LOCAL

TENSORS = ("params", "velocity", "second_moment")
TEXTS = ("state", "ledgers")
DIGEST = "digest"

Positions = Mapping[str, LedgerPosition]


def metadata_of(state: State, positions: Positions) -> dict[str, str]:
    """The numbers of a state and the positions of the run's ledgers, as a file of tensors keeps
    them."""
    beside = (*TENSORS, "carried")
    numbers = {name: value for name, value in vars(state).items() if name not in beside}
    written = {name: dataclasses.astuple(position) for name, position in positions.items()}
    metadata = {"state": json.dumps(numbers), "ledgers": json.dumps(written)}
    return {**metadata, DIGEST: _digest(metadata)}


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
    return hashlib.sha256("\n".join(metadata[name] for name in TEXTS).encode()).hexdigest()
