"""What one must believe: docs/results/perimeter.csv lists each function that holds a private value
before its noise, for each guarantee, and each way in which one leaves PyTorch. A function or a way
out that is not listed fails the test with its stack.

    python -m tests.perimeter.test_perimeter    # prints the list as it is now
"""

from __future__ import annotations

import ast
import csv
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore import task_identity
from torch.utils.data import TensorDataset

from discreet import DPSGD, LoopPrivacy, simulate
from discreet.data.datasets import load_task
from discreet.flower.serving import encode_request, parameters_record
from discreet.mechanisms.sums import CohortSum
from discreet.node.app import train
from discreet.run_files.compose import load_config
from tests.conftest import REPOSITORY
from tests.node.clients import EXAMPLE, config, ledger_at, request
from tests.perimeter.followed import PACKAGE, Followed, Place, followed_from
from tests.tables.made_tables import make_project

LIST = REPOSITORY / "docs" / "results" / "perimeter.csv"
COLUMNS = ["guarantee", "file", "function", "lines", "ways_out"]
USER = "data.num_clients=30 privacy.user.noise_multiplier=4 privacy.user.too_noisy=warn"
RATED = "evaluation.kind=private evaluation.every=1"
LOCAL = "experiment=gaussian_local data.num_clients=30"
OWNERS = "privacy.delta=1e-3 training.batch_size=10 data.num_clients=3 data.path={path}"
ONE = "engine=sequential"
RUNS = {
    "user": f"{USER} {ONE}",
    "user, cohorts": USER,
    "user, secure": f"experiment=organisations {ONE}",
    "example": f"experiment=silos {ONE}",
    "example, cohorts": "experiment=silos",
    "owners": f"experiment=hospitals {OWNERS} {ONE}",
    "owners, secure": f"experiment=hospitals_secure {OWNERS} {ONE}",
    "local Gaussian": f"{LOCAL} {ONE}",
    "local Laplace": f"experiment=laplace_local {ONE}",
    "ratings": f"{USER} {RATED} {ONE}",
    "statistics": f"{USER} data.normalise=private {ONE}",
}
Seen = Callable[[Path], Followed]


@contextmanager
def in_this_process() -> Iterator[None]:
    """Cohorts are trained here: no mark goes to another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        yield


def of_run(words: str, folder: Path) -> Followed:
    if "{path}" in words:
        table = folder / "data"
        table.mkdir()
        make_project(table, people=60)
        words = words.format(path=table)
    asked = [*words.split(), "rounds=1", "seed=50051", f"output_dir={folder / 'run'}"]
    data = load_config(asked).data
    task = load_task(data.name, path=data.path)
    with in_this_process(), followed_from(task.train.inputs, task.train.targets) as seen:
        simulate(*asked)
    return seen


def of_a_node(words: tuple[str, ...], folder: Path) -> Followed:
    """A message to a ClientApp, over Flower's records."""
    ledger_at(folder / "ledger.db")
    node: dict[str, bool | float | int | str] = {
        "partition-id": 1,
        "num-partitions": 12,
        "ledger": str(folder / "ledger.db"),
    }
    run = ("data.name=digits", "data.num_clients=12", "model.name=logistic_regression", *words)
    asked = request(config(*run, "privacy.delta=1e-3"), clip_norm=1.0)
    sent = encode_request(asked, parameters_record(torch.zeros(650)))
    task = load_task("digits", path=None)
    with (
        pytest.MonkeyPatch.context() as patch,
        followed_from(task.train.inputs, task.train.targets) as seen,
    ):
        for name in ("_run_id", "_node_id", "_task_id"):
            patch.setattr(task_identity.TaskIdentity, name, 1)
        reply = train(Message(sent, 1, "train"), Context(1, 1, node, RecordDict(), {}))
    assert not reply.has_error()
    return seen


def of_a_loop(folder: Path) -> Followed:
    draw = torch.Generator().manual_seed(50033)
    data = torch.randn(40, 3, generator=draw), torch.randint(2, (40,), generator=draw)
    model = torch.nn.Linear(3, 2)
    private = DPSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(*data),
        loss=torch.nn.CrossEntropyLoss(reduction="none"),
        batch_size=10,
        epochs=1,
        delta=1e-3,
        privacy=LoopPrivacy(noise_multiplier=1.0, seed=50047),
    )
    with followed_from(*data) as seen:
        for inputs, targets in private:
            private.step(inputs, targets)
    return seen


KINDS: dict[str, Seen] = {name: partial(of_run, words) for name, words in RUNS.items()}
KINDS |= {"DPSGD": of_a_loop}
# What a node draws follows no seed, so a function that is listed need not be reached.
MESSAGES: dict[str, Seen] = {
    "a user-level message": partial(of_a_node, ()),
    "an example-level message": partial(of_a_node, EXAMPLE),
}
KINDS |= MESSAGES
QUICK = {"user", "example", "DPSGD", *MESSAGES}


def tier_of(kind: str) -> list[pytest.MarkDecorator]:
    if kind in QUICK:
        return []
    return [pytest.mark.processes if kind == "user, secure" else pytest.mark.slow]


def listed(kind: str) -> tuple[set[Place], set[tuple[str, Place]]]:
    with LIST.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["guarantee"] == kind]
    held = {(row["file"], row["function"]) for row in rows}
    left = {
        (way, (row["file"], row["function"])) for row in rows for way in row["ways_out"].split()
    }
    return held, left


@pytest.mark.parametrize("kind", [pytest.param(each, marks=tier_of(each)) for each in KINDS])
def test_a_private_value_is_held_only_by_the_functions_that_are_listed(
    kind: str, tmp_path: Path
) -> None:
    seen = KINDS[kind](tmp_path)
    held, left = listed(kind)
    for place, stack in seen.held.items():
        assert place in held, f"{place} holds a private value and is not listed:\n{stack}"
    for way, stack in seen.left.items():
        assert way in left, f"a private value leaves PyTorch by {way}, not listed:\n{stack}"
    assert seen.held
    if kind not in MESSAGES:
        assert held == {*seen.held} | {place for _, place in seen.left}
        assert left == {*seen.left}


def test_a_line_that_logs_a_private_value_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take = CohortSum.take

    def logging(self: CohortSum, reply: Any) -> Any:
        print(float(reply.update.norm()))
        return take(self, reply)

    monkeypatch.setattr(CohortSum, "take", logging)
    seen = KINDS["user"](tmp_path)
    held, left = listed("user")
    assert {*seen.held} - held
    assert {*seen.left} - left


def lines_of(place: Place) -> int:
    """The lines of a function, from its first to its last."""
    file, name = place
    scope: Any = ast.parse((PACKAGE / file).read_text())
    for part in name.split("."):
        found = [
            each
            for each in scope.body
            if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == part
        ]
        if not found:
            return 0
        scope = found[-1]
    return int(scope.end_lineno - scope.lineno + 1)


def rows_of(kind: str, seen: Followed) -> Iterator[list[object]]:
    places = {*seen.held} | {place for _, place in seen.left}
    for place in sorted(places):
        ways = sorted({way for way, at in seen.left if at == place})
        yield [kind, *place, lines_of(place), " ".join(ways)]


def test_the_page_counts_what_is_listed() -> None:
    with LIST.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert {row["guarantee"] for row in rows} == {*KINDS}
    places = {(row["file"], row["function"]) for row in rows}
    lines = sum(map(lines_of, places))
    page = (REPOSITORY / "docs" / "privacy.md").read_text()
    files = len({file for file, _ in places})
    assert f"{len(places)} functions in {files} files" in page
    assert f"{round(lines, -2)} lines" in page
    told = re.findall(r"^\| ([\w, ]+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert len(told) >= 6
    for kind, functions, about in told:
        of_kind = {(row["file"], row["function"]) for row in rows if row["guarantee"] == kind}
        assert len(of_kind) == int(functions)
        assert abs(sum(map(lines_of, of_kind)) - int(about)) <= 50


def main() -> None:
    import tempfile

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for kind, follow in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            writer.writerows(rows_of(kind, follow(Path(folder))))
    print(text.getvalue(), end="", file=sys.stderr)


if __name__ == "__main__":
    main()
