"""A Flower app in one process, for tests of `DPFedAvg`: a grid whose nodes answer as they are told,
and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result
from flwr.superlink.grid import InMemoryGrid

from discreet import AdaptiveClipping, CentralGaussian
from discreet.flower.strategy import DPFedAvg
from discreet.run_files.run_folder import RunFolder, RunStatus, read_status

NODES = 6
Answer = Callable[[Message], RecordDict | Error | None]

START = {
    "weight": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "bias": np.zeros(2, np.float32),
    "steps": np.array(3, np.int64),
}


def arrays(**changed: np.ndarray) -> ArrayRecord:
    """What a run starts from."""
    return ArrayRecord({name: Array(values) for name, values in {**START, **changed}.items()})


def changed_by(step: float, *, metrics: MetricRecord | None = None) -> Answer:
    """A client that adds `step` to the floats that it gets, one to whole numbers, and reports
    metrics."""

    def answer(message: Message) -> RecordDict:
        record = message.content["arrays"]
        assert isinstance(record, ArrayRecord)
        values = {name: array.numpy() for name, array in record.items()}
        steps = {
            name: value.dtype.type(step if value.dtype.kind == "f" else 1)
            for name, value in values.items()
        }
        new = {name: Array(np.asarray(value + steps[name])) for name, value in values.items()}
        return RecordDict(
            {"arrays": ArrayRecord(new), "metrics": metrics or MetricRecord({"num-examples": 10})}
        )

    return answer


def replying(content: RecordDict | Error | None) -> Answer:
    """A client that always says the same; None never replies."""
    return lambda message: content


@dataclass
class FakeGrid:
    """Nodes that answer in this process, each as it is told to and so many times; an answer of None
    never comes."""

    answers: dict[int, Answer] = field(
        default_factory=lambda: dict.fromkeys(range(1, NODES + 1), changed_by(0.01))
    )
    times: int = 1
    sent: dict[str, Message] = field(default_factory=dict)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            names.append(f"m{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            self.sent[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for name in message_ids:
            answer = self.answers[self.sent[name].metadata.dst_node_id](self.sent[name])
            if answer is not None:
                replies += [Message(answer, reply_to=self.sent[name])] * self.times
        return replies


@dataclass
class Nodes(FakeGrid, InMemoryGrid):
    """A simulation, so that a seed is allowed."""


NOISED = CentralGaussian(noise_multiplier=1.0, delta=1e-3, clipping=AdaptiveClipping(0.5))
SETTINGS: dict[str, Any] = {
    "min_available_nodes": 1,
    "population_size": 10,
    "mechanism": NOISED,
    "seed": 40127,
}


def noised(**changed: Any) -> dict[str, Any]:
    """The argument `mechanism` with what a test changes of it."""
    return {"mechanism": replace(NOISED, **changed)}


def strategy(folder: Path, **settings: Any) -> DPFedAvg:
    """The strategy with settings of a test."""
    return DPFedAvg(**{**SETTINGS, "output_dir": str(folder), **settings})


def run(folder: Path, grid: Nodes | None = None, *, num_rounds: int = 2, **settings: Any) -> Result:
    """A whole run."""
    grid = Nodes() if grid is None else grid
    return strategy(folder, **settings).start(grid, arrays(), num_rounds=num_rounds, timeout=2.0)


def values_of(result: Result) -> dict[str, np.ndarray]:
    """The arrays of a result."""
    return {name: array.numpy() for name, array in result.arrays.items()}


def status_of(folder: Path) -> RunStatus:
    """How a run says that it stands."""
    return read_status(RunFolder(folder))
