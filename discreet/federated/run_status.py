"""The state of a run while it goes on: a small file in the run folder that whoever watches can read at any time."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from discreet.federated.run_folder import RunFolder

STATUS_FILE = "status.json"
STATES = ("running", "finished", "stopped", "interrupted")
OVER = ("finished", "stopped")  # the files of the run folder are complete


@dataclass(frozen=True)
class RunStatus:
    """What is known of a run besides its metrics and its ledger.

    Attributes:
      state: `running`, `finished` (the planned rounds are done and every file is there), `stopped` (before them, for
        `reason`), `interrupted` (the server was asked to end, or could not go on; `reason` says which). A server that
        was killed leaves `running` behind, with an old `updated`.
      rounds: how many are planned.
      nodes: connected when the last cohort was drawn; None before the first one.
      failures: of clients that were asked, over the whole run, by kind.
      last_failure, last_failure_round: the latest of them in words.
      reason: why the run stopped or was interrupted.
      updated: when this was written, ISO 8601, UTC.
    """

    state: str
    rounds: int
    nodes: int | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    last_failure: str | None = None
    last_failure_round: int | None = None
    reason: str | None = None
    updated: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)} (got {self.state})")


def after_round(
    status: RunStatus, *, number: int, nodes: int, failures: Mapping[str, int], last_failure: str | None
) -> RunStatus:
    """The status with a round's failures added."""
    kinds = {*status.failures, *failures}
    total = {kind: status.failures.get(kind, 0) + failures.get(kind, 0) for kind in sorted(kinds)}
    if last_failure is None:
        return replace(status, nodes=nodes, failures=total)
    return replace(status, nodes=nodes, failures=total, last_failure=last_failure, last_failure_round=number)


def write_status(folder: RunFolder, status: RunStatus, *, now: datetime | None = None) -> None:
    """Replaces the status file as a whole. It is not flushed to disk: nothing is decided by it."""
    stamped = replace(status, updated=(now or datetime.now(UTC)).isoformat(timespec="seconds"))
    beside = folder.path / f".{STATUS_FILE}.{os.getpid()}"
    beside.write_text(json.dumps(dataclasses.asdict(stamped)) + "\n")
    os.replace(beside, folder.path / STATUS_FILE)


def write_end(folder: RunFolder, stopped: str | None) -> None:
    """Writes that a run is over: `stopped` if a reason is given, `finished` otherwise."""
    write_status(folder, replace(_last(folder), state="stopped" if stopped else "finished", reason=stopped))


def note_interruption(folder: RunFolder, reason: str) -> int:
    """Writes that a run was interrupted, if it counts as running, and gives its last whole round.

    Nobody may be writing the run any more.
    """
    done, status = folder.load_checkpoint(), _last(folder)
    if status.state == "running":
        write_status(folder, replace(status, state="interrupted", reason=reason))
    return done.round if done else 0


def state_of(folder: RunFolder) -> str:
    """The state of a run by its status file; empty before there is one."""
    status = read_status(folder)
    return status.state if status else ""


def _last(folder: RunFolder) -> RunStatus:
    return read_status(folder) or RunStatus("running", folder.read_config().rounds)


def read_status(folder: RunFolder) -> RunStatus | None:
    """The last status; None where the run has written none yet, or the file is not one."""
    try:
        return RunStatus(**json.loads((folder.path / STATUS_FILE).read_text()))
    except (FileNotFoundError, TypeError, ValueError):
        return None
