"""A site made for a test: patients, blocks, an account, a policy, and the messages that a server
would send."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.config import get_metadata_from_config
from flwr.supercore.task_identity import TaskIdentity

from discreet.guard.block_task import BlockTask
from discreet.guard.guard_policy import GuardPolicy, read_guard
from discreet.guard.patient_blocks import split_site
from discreet.guard.sandbox import BlockInput, BlockResult
from discreet.guard.site_guard import App
from discreet.ledger.durable_ledger import DurableLedger

HOSTILE = Path(__file__).parent / "hostile"
SHAPES = {"weight": (2, 3), "bias": (2,)}
SIZE, C, Z, DELTA = 8, 0.5, 4.0, 1e-5
RUN, NODE = 7, 11


def table(folder: Path, patients: Mapping[str, float]) -> Path:
    """A table with one row for each patient."""
    path = folder / "rows.csv"
    path.write_text(
        "patient,value\n" + "".join(f"{name},{value}\n" for name, value in patients.items())
    )
    return path


def guard_toml(folder: Path, *, blocks: int = 2, **settings: object) -> Path:
    """A guard.toml; values are written as TOML has them."""
    given = {
        "ledger": "ledger.db",
        "any": True,
        "enclosure": "kernel",
        "max-epsilon": 20.0,
        "max-delta": DELTA,
        "min-noise-multiplier": Z,
        "clip-norm": C,
        "block-seconds": 8.0,
    } | {name.replace("_", "-"): value for name, value in settings.items()}
    lines = [
        f"{name} = {_toml(value)}" for name, value in given.items() if not isinstance(value, dict)
    ]
    tables = {"blocks": {"folder": "site", "id": "patient", "count": blocks}}
    tables |= {name: value for name, value in given.items() if isinstance(value, dict)}
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    path = folder / "guard.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)


def site(
    folder: Path, patients: Mapping[str, float], *, blocks: int = 2, **settings: object
) -> GuardPolicy:
    """A site that is split, with its account and policy."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    split_site(table(folder, patients), folder / "site", id_column="patient", count=blocks)
    DurableLedger.create(folder / "ledger.db")
    return read_guard(guard_toml(folder, blocks=blocks, **settings))


def arrays(**changed: np.ndarray) -> ArrayRecord:
    """What a server sends: zeros of `SHAPES`."""
    made = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return ArrayRecord({name: Array(values) for name, values in {**made, **changed}.items()})


def message(content: RecordDict | None = None, *, kind: str = "train", number: int = 1) -> Message:
    """A message of a server."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1
    given = content or RecordDict({"arrays": arrays(), "config": ConfigRecord({"lr": 0.1})})
    made = Message(given, dst_node_id=NODE, message_type=kind, group_id=str(number))
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


def context(**config: Any) -> Context:
    """The context of a run."""
    run_config = {name.replace("_", "-"): value for name, value in config.items()}
    return Context(RUN, NODE, {}, RecordDict(), run_config)


def bundle(folder: Path = HOSTILE) -> App:
    """The bundle of an app in a folder."""
    import hashlib
    import tomllib

    files = {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    content, _ = build_fab_from_files(
        {name: path for name, path in files.items() if "__pycache__" not in name}
    )
    fab_id, version = get_metadata_from_config(
        tomllib.loads((folder / "pyproject.toml").read_text())
    )
    return App(RUN, fab_id, version, hashlib.sha256(content).hexdigest(), content)


class PlayedSandbox:
    """A sandbox that runs a function of a block's table in this process, for tests of what is done
    with its result."""

    def __init__(self, play: Callable[[Sequence[float]], np.ndarray | None]) -> None:
        self.play = play
        self.tasks: list[BlockTask] = []
        self.given: list[tuple[int, bytes]] = []  # the number of each block that ran, and its state

    def run(self, task: BlockTask, blocks: Sequence[BlockInput]) -> Iterator[BlockResult]:
        """What came of each block."""
        self.tasks.append(task)
        for block in blocks:
            self.given.append((block.number, block.state))
            vector = self.play(values_in(block.archive))
            yield BlockResult(block.number, vector, b"of %d" % block.number, b"")


def values_in(descriptor: int) -> list[float]:
    """The values in the table of an archive."""
    import io
    import tarfile

    size = os.fstat(descriptor).st_size
    with tarfile.open(fileobj=io.BytesIO(os.pread(descriptor, size, 0))) as archive:
        file = archive.extractfile("rows.csv")
        assert file is not None
        return [float(line.split(",")[1]) for line in file.read().decode().splitlines()[1:]]
