"""The run folder: the files of a run, written by the server as it goes and read by every later
command.

- config.yaml: the configuration, resolved.
- asked.yaml: the same as it was asked for, before a target epsilon became a noise multiplier.
- ledger.db: what the guarantee that the server accounts has spent (`durable_ledger`).
- clients.db: in a simulation, what the virtual clients have spent by their own accounts.
- secrets.safetensors: while the run is unfinished, the keys of correlated noise (`RunSecrets`).
- lock: held by the one process that writes the run.
- status.json: how the run stands. Whoever watches can read it at any time.
- metrics.csv: a row a round. roc.csv: ROC curves, if clients rate AUC.
- checkpoint/: the state after the last whole round, and after the best on the public test set; of
  a run whose nodes take turns, their numbers.
- privacy.json: of each guarantee unit, adjacency, events, epsilon by accountant, not covered.
- model.safetensors: the parameters, by name.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from yaml import YAMLError  # type: ignore[import-untyped]

from discreet.ledger.durable_ledger import (
    CLIENTS_LEDGER,
    DurableLedger,
    LedgerError,
    LedgerPosition,
    position_in,
)
from discreet.planning.plan import Plan
from discreet.planning.state import State
from discreet.run_files.call import Call
from discreet.run_files.compose import parse_asked
from discreet.run_files.metrics_table import line_of, table_of
from discreet.run_files.whole_files import replace_file
from discreet.settings.adjacency import EXAMPLE, LOCAL
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, described

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.yaml"
ASKED = "asked.yaml"
STATUS = "status.json"
ACCOUNT = "account"
BEST = "best.safetensors"
# Settings of earlier versions, by section of config.yaml.
GONE = (
    ("", "tracking"),
    ("", "tracking_uri"),
    ("operations", "metrics_port"),
    ("operations", "metrics_host"),
)
OVER = ("finished", "stopped")  # the files of the run folder are complete
# of a checkpoint: the tensors of its state, and the texts beside them with their digest
TENSORS = ("params", "velocity", "second_moment")
OWN = "own."  # before the names of vectors of a server optimizer from outside
TEXTS = ("state", "ledgers")
DIGEST = "digest"
SECRETS = "secrets.safetensors"
# the mark of a secrets file, and its content before it had one
KEPT = "secrets"
BEFORE_KEPT = {"round", "total", "keys", "replies"}

logger = logging.getLogger("discreet")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, and the order in which they are written.

    Every file but the ledger and the metrics is replaced as a whole: written beside its name,
    flushed to disk, renamed."""

    path: Path

    @cached_property
    def ledger_path(self) -> Path:
        return self.path / "ledger.db"

    @cached_property
    def clients_ledger_path(self) -> Path:
        return self.path / CLIENTS_LEDGER

    @cached_property
    def checkpoint_path(self) -> Path:
        return self.path / "checkpoint" / "state.safetensors"

    @property
    def arrays_path(self) -> Path:
        """The arrays of a run of another Flower app that are not trained, and its initial
        arrays."""
        return self.path / "checkpoint" / "arrays.safetensors"

    @property
    def members_path(self) -> Path:
        """The numbers of the nodes that take turns (`RunMembers`)."""
        return self.path / "checkpoint" / "members.json"

    @cached_property
    def metrics_path(self) -> Path:
        return self.path / "metrics.csv"

    def ledger(self, plan: Plan) -> DurableLedger:
        """The server's ledger. LedgerError: it is missing or has other settings."""
        return run_ledger(self.ledger_path, facts=plan.deciding)

    def positions(self) -> dict[str, LedgerPosition]:
        """The position of each ledger at the last checkpoint; empty before it. LedgerError: the
        file is damaged."""
        return self._numbers()[1]

    def reported(self) -> dict[str, float]:
        """The largest epsilons that clients had reported by the last checkpoint, by guarantee;
        empty before it. LedgerError: the file is damaged."""
        numbers, _ = self._numbers()
        if numbers:
            return reported_epsilons(numbers)
        return {}

    def done(self) -> int:
        """The last round that the checkpoint has, or that the status says is done. LedgerError: the
        checkpoint is damaged."""
        numbers, _ = self._numbers()
        status = read_status(self)
        planned = status.rounds if status is not None and status.state == "finished" else 0
        return max(int(numbers.get("round", 0)), planned)

    def _numbers(self) -> tuple[dict[str, Any], dict[str, LedgerPosition]]:
        """The last checkpoint without its tensors, for which PyTorch is not needed."""
        if not self.checkpoint_path.exists():
            return {}, {}
        with _open_tensors(self.checkpoint_path, framework="np") as file:
            return numbers_in(self.checkpoint_path, file.metadata() or {})

    def write_config(self, settings: Settings, *, device: str = "cpu", name: str = CONFIG) -> None:
        """Writes `config.yaml`, or `asked.yaml` by its name, with the device of the run's last
        call."""
        text = OmegaConf.to_yaml({"device": device, **described(settings)})
        replace_file(self.path / name, text.encode())

    def read_config(self, *, name: str = CONFIG) -> Settings:
        """The settings that `read_asked` returns."""
        return self.read_asked(name=name)[0]

    def read_asked(self, *, name: str = CONFIG) -> tuple[Settings, Call]:
        """The configuration that the run was started with, and the call. ConfigError: there is
        none, or it can't be read."""
        path = self.path / name
        if not path.exists():
            raise ConfigError(f"{self.path} does not contain a run: {name} is missing")
        try:
            settings = OmegaConf.create(path.read_text(encoding="utf-8"))
            if not isinstance(settings, DictConfig):
                raise ConfigError("it does not contain settings")
            for group, name in GONE:
                (settings.get(group, {}) if group else settings).pop(name, None)
            return parse_asked(settings)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        except AssertionError as error:  # OmegaConf's, of a text that is a number
            raise ConfigError(f"{path} is damaged: it does not contain settings") from error
        except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from error

    def save_checkpoint(
        self,
        state: State,
        *,
        best: bool = False,
        charged: LedgerPosition | None = None,
        account: LedgerPosition | None = None,
    ) -> None:
        """Replaces the last or the best checkpoint as a whole, with the positions of its ledgers.

        Args:
          charged: the position of `ledger.db` after the caller's last charge, if it made one; else
            it is read.
          account: the position of the population's account, if the run charges one.
        """
        if best:
            path = self.checkpoint_path.with_name(BEST)
        else:
            path = self.checkpoint_path
        positions = dict[str, LedgerPosition]()
        if charged:
            positions[self.ledger_path.name] = charged
        for ledger in (self.ledger_path, self.clients_ledger_path):
            if ledger.name not in positions and ledger.exists():
                positions[ledger.name] = position_in(ledger)
        if account:
            positions[ACCOUNT] = account
        path.parent.mkdir(exist_ok=True)
        tensors, metadata = parts_of_state(state, positions)
        write_tensors(path, tensors, metadata)

    def load_checkpoint(self, *, best: bool = False) -> State | None:
        """The last checkpoint, None before the first round is done; or the best one, None before a
        run has started. LedgerError: the file is damaged."""
        if best:
            path = self.checkpoint_path.with_name(BEST)
        else:
            path = self.checkpoint_path
        if path.exists():
            return _read_checkpoint(path)[0]
        return None

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Adds a round's row to `metrics.csv` and flushes it. If the row has new columns, as the
        first one has, the file is replaced: a resumed run may lack the columns of a rating."""
        columns: list[str] = []
        if self.metrics_path.exists():
            with self.metrics_path.open(newline="", encoding="utf-8") as file:
                columns = next(csv.reader(file), [])
        if not row.keys() <= {*columns}:
            self.replace_metrics([*self.read_metrics(), row])
            return
        with self.metrics_path.open("a", newline="") as file:
            file.write(line_of(row, columns))
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, float | None]]:
        """The rows of `metrics.csv`, with None where a round has no such number. A truncated last
        line is ignored. ConfigError: the file does not contain rows of numbers."""
        if not self.metrics_path.exists():
            return []
        try:
            with self.metrics_path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if rows and None in rows[-1].values():
                rows.pop()
            numbers = [
                {name: float(value) if value else None for name, value in row.items()}
                for row in rows
            ]
            if any(None in row.values() for row in rows) or any(
                row.get("round") is None for row in numbers
            ):
                raise ValueError("a row is truncated or has no round")
            return numbers
        except (ValueError, TypeError, csv.Error) as error:
            raise ConfigError(f"{self.metrics_path} is damaged: {error}") from error

    def metrics_fault(self, rows: Sequence[Mapping[str, float | None]], done: int) -> str:
        """The fault of a `metrics.csv` that has not the rows of all rounds that are done; else
        empty. `done`: as `done` gave it before the rows were read, since a run may go on."""
        last = max((int(row["round"] or 0) for row in rows), default=0)
        if last >= done:
            return ""
        kept = f"ends after round {last}" if self.metrics_path.exists() else "is missing"
        return f"{self.metrics_path} {kept}, and {done} rounds are done: restore the file"

    def replace_metrics(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Replaces the rows of `metrics.csv`."""
        replace_file(self.metrics_path, table_of(rows).encode())


def run_ledger(path: Path, *, facts: Mapping[str, object] | None = None) -> DurableLedger:
    """A ledger in a run folder. LedgerError: as `DurableLedger`; a new one is no remedy here."""
    if not path.is_file():
        raise LedgerError(
            f"{path} is missing: put this run's ledger back, because what was spent still counts"
        )
    return DurableLedger(path, facts=facts)


@dataclass(frozen=True)
class RunSecrets:
    """The `CarriedState` of a run with a folder, readable by the server's user only, because noise
    can be removed with it. It is deleted when the run is over."""

    folder: Path

    @cached_property
    def path(self) -> Path:
        return self.folder / SECRETS

    def load(self) -> Mapping[str, Tensor]:
        """The state that was saved last; empty before. LedgerError: the file is damaged or is a
        different file."""
        tensors, facts = read_tensors(self.path) if self.path.exists() else ({}, {KEPT: ""})
        if KEPT in facts or (not facts and tensors.keys() == BEFORE_KEPT):
            return tensors
        raise LedgerError(
            f"{self.path} does not contain a run's secrets: restore the file that the "
            "run has written"
        )

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the file as a whole. It is on disk when this returns, and has mode 0600 from its
        first byte."""
        write_tensors(self.path, tensors, {KEPT: ""}, mode=0o600)

    def erase(self) -> None:
        """Removes the file, if there is one."""
        self.path.unlink(missing_ok=True)


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors in a file by name, and its metadata. LedgerError: the file is damaged."""
    with _open_tensors(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def _open_tensors(path: Path, *, framework: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise LedgerError(f"{path} is damaged: {error}") from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, mode: int = 0o666
) -> None:
    """Replaces a file of tensors as a whole."""
    save = import_module(
        "safetensors.torch"
    ).save  # with torch: who only reads a run starts without it
    replace_file(path, save(dict(tensors), metadata=dict(metadata)), mode=mode)


def _read_checkpoint(path: Path) -> tuple[State, dict[str, LedgerPosition]]:
    tensors, metadata = read_tensors(path)
    numbers, positions = numbers_in(path, metadata)
    own = [name for name in tensors if name.startswith(OWN)]
    vectors = {name.removeprefix(OWN): tensors.pop(name) for name in own}
    try:
        return State(**tensors, **numbers, vectors=vectors), positions
    except TypeError as error:
        raise LedgerError(f"{path} is damaged: {error}") from error


def parts_of_state(
    state: State, positions: Mapping[str, LedgerPosition]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a state by name, and its numbers and the positions of the run's ledgers, as a
    file of tensors keeps them. What a mechanism carries is a secret, and not among them."""
    numbers = dict(vars(state))
    del numbers["carried"]
    tensors: dict[str, Tensor] = {}
    for name in TENSORS:
        tensors[name] = numbers.pop(name)
    for name, vector in numbers.pop("vectors").items():
        tensors[f"{OWN}{name}"] = vector
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


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    Attributes:
      state: `running`, `finished` (the planned rounds are done and every file is there), `stopped`
        (before them) or `interrupted`, both for a `reason`. A server that was killed leaves
        `running`, without a process that holds the folder's lock.
      nodes: the number of nodes connected when the last cohort was drawn; None before the first
        one.
      failures: the number of failures of clients that were asked, over the whole run, by kind; and
        the latest one in words.
      updated: the time of the last change (ISO 8601).
    """

    state: str
    rounds: int
    nodes: int | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    last_failure: str | None = None
    last_failure_round: int | None = None
    reason: str | None = None
    updated: str = ""


STATUS_FILE = TypeAdapter(RunStatus)


def read_status(folder: RunFolder) -> RunStatus | None:
    """The last status; None if the run has not written one yet, or the file is invalid."""
    try:
        found = STATUS_FILE.validate_json((folder.path / STATUS).read_bytes())
        since = datetime.fromisoformat(found.updated)
    except (OSError, ValueError):
        return None
    if since.tzinfo is None:
        return None
    return found


def state_of(folder: RunFolder) -> str:
    """The state of a run in its status file; empty before there is one."""
    return getattr(read_status(folder), "state", "")


def write_status(folder: RunFolder, status: RunStatus) -> None:
    """Replaces the status file as a whole. It is not flushed to disk, because nothing depends on
    it."""
    stamped = replace(status, updated=datetime.now(UTC).isoformat(timespec="seconds"))
    replace_file(
        folder.path / STATUS, (json.dumps(dataclasses.asdict(stamped)) + "\n").encode(), flush=False
    )


def change_state(folder: RunFolder, state: str, reason: str | None) -> None:
    """Replaces the state of a run and its reason."""
    last = read_status(folder) or RunStatus("running", folder.read_config().rounds)
    write_status(folder, replace(last, state=state, reason=reason))


def note_interruption(folder: RunFolder, reason: str) -> int:
    """Records that a run was interrupted, if its state is running, and returns its last complete
    round. No process may still be writing the run."""
    done = folder.load_checkpoint()
    with suppress(OSError):  # the disk may be full; nothing is decided by it
        if state_of(folder) in ("", "running"):
            change_state(folder, "interrupted", reason)
    if done:
        return done.round
    return 0
