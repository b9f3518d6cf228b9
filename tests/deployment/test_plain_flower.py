"""Flower's own SuperLink and SuperNodes, as docs/guide/flower_privacy.md starts them, with an app
whose clients noise what leaves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from discreet.deployment.flower_home import (
    CONNECTION,
    flower_environment,
    free_port,
    start,
    wait_until,
    write_connection,
)
from discreet.ledger.durable_ledger import DurableLedger
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.processes

NODES, ROUNDS, DELTA = 3, 2, 1e-5
LONGEST = 240.0
MOD = f"discreet.local_dp_mod(clip_norm=1.0, target_epsilon=8.0, delta={DELTA}, rounds={ROUNDS})"
CONFIG = f"num-server-rounds={ROUNDS} fraction-train=1.0 local-epochs=1"


def app_with_the_mod(folder: Path) -> Path:
    """The quickstart with the lines of the guide."""
    app = folder / "app"
    shutil.copytree(
        REPOSITORY / "examples" / "quickstart",
        app,
        ignore=shutil.ignore_patterns("__pycache__", "*.md"),
    )
    client = app / "quickstart" / "client_app.py"
    text = client.read_text().replace("app = ClientApp()", f"app = ClientApp(mods=[{MOD}])")
    client.write_text(text.replace("from flwr.app import", "import discreet\nfrom flwr.app import"))
    server = app / "quickstart" / "server_app.py"
    was = "FedAvg(fraction_train=fraction_train)"
    server.write_text(
        server.read_text().replace(
            was,
            f"FedAvg(fraction_train=fraction_train, fraction_evaluate=0.0, min_available_nodes={NODES})",
        )
    )
    return app


@contextmanager
def running(folder: Path, name: str, words: Sequence[str]) -> Iterator[Path]:
    """One of Flower's commands, started in `folder`; yields its log."""
    log = folder / f"{name}.log"
    process = start(
        [str(Path(sys.executable).with_name(words[0])), *words[1:]],
        log,
        folder=folder,
        environment=flower_environment(folder / name),
    )
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def supernode(number: int, superlink: str) -> list[str]:
    """The guide's command, on one machine and without TLS."""
    config = f'partition-id={number} num-partitions={NODES} ledger="node-{number}.db"'
    words = ["flower-supernode", "--superlink", superlink, "--node-config", config]
    return [*words, "--insecure", "--port", str(free_port())]


def flwr_run(folder: Path, app: Path) -> str:
    """What `flwr run --stream` says."""
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("flwr")),
            *("run", str(app), CONNECTION, "--stream", "--run-config", CONFIG),
        ],
        env=flower_environment(folder / "operator"),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    return done.stdout + done.stderr


def test_three_nodes_of_flowers_own_train_once_and_pay_each_from_its_own_ledger(
    tmp_path: Path,
) -> None:
    discreet = str(Path(sys.executable).with_name("discreet"))
    for number in range(NODES):
        subprocess.run(
            [discreet, "ledger", "create", f"node-{number}.db"], cwd=tmp_path, check=True
        )
    port = free_port()
    superlink = f"127.0.0.1:{port}"
    write_connection(tmp_path / "operator", address=superlink, authority=None)
    app = app_with_the_mod(tmp_path)
    with (
        running(
            tmp_path, "superlink", ["flower-superlink", "--insecure", "--port", str(port)]
        ) as log,
        running(tmp_path, "node-0", supernode(0, superlink)),
        running(tmp_path, "node-1", supernode(1, superlink)),
        running(tmp_path, "node-2", supernode(2, superlink)),
    ):
        wait_until(lambda: "Uvicorn running" in log.read_text(), LONGEST, "the SuperLink listens")
        said = flwr_run(tmp_path, app)
        again = flwr_run(tmp_path, app)
    assert f"[ROUND {ROUNDS}/{ROUNDS}]" in said
    assert said.count("Received 3 results and 0 failures") == ROUNDS
    assert again.count("Received 0 results and 3 failures") == ROUNDS
    assert "the local-level budget is spent: this round would reach epsilon 10" in again
    for number in range(NODES):
        spent = DurableLedger(tmp_path / f"node-{number}.db").spent("local", data_owner=str(number))
        assert spent.num_releases == ROUNDS
        assert spent.epsilon(DELTA) == pytest.approx(8.0, abs=0.01)
