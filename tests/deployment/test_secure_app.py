"""The quickstart under secure aggregation, as its author would run it: `flwr run`, with the mod at the clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from discreet.deployment.flower_home import CONNECTION, wait_until
from discreet.deployment.local_federation import Federation, demonstration, federation_of
from discreet.ledger.durable_ledger import DurableLedger
from tests.deployment.app_runs import ROOT, RUN_SECONDS, private_copy, run_folder_of

GUIDE = ROOT / "docs" / "guide" / "flower_app.md"
NODES, ROUNDS = 4, 2
CONFIG = f"num-server-rounds={ROUNDS} fraction-train=1.0 local-epochs=1"
IMPORTS = ("from discreet import DPFedAvg\n", "from discreet import AdaptiveClipping, DPFedAvg, MaskedGaussian\n")
CLIENT = ("app = ClientApp()\n", "app = ClientApp(mods=[discreet.secure_sum_mod])\n")
SERVER = (
    "        population_size=100,\n        target_epsilon=8.0,\n        delta=1e-3,\n        clip_norm=1.0,\n",
    f"        population_size={NODES},\n"
    f"        min_available_nodes={NODES},\n"
    '        sampling="everyone",\n'
    "        mechanism=MaskedGaussian(\n"
    '            target_epsilon=8.0, delta=1e-3, clipping=AdaptiveClipping(norm=1.0), too_noisy="warn"\n'
    "        ),\n",
)


def replaced(path: Path, old: str, new: str) -> None:
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def secure_copy(folder: Path) -> Path:
    """The private quickstart with the lines that the guide adds."""
    app = private_copy(folder)
    client = app / "quickstart" / "client_app.py"
    replaced(client, *CLIENT)
    replaced(client, "from flwr.app import", "import discreet\nfrom flwr.app import")
    replaced(app / "quickstart" / "server_app.py", *SERVER)
    replaced(app / "quickstart" / "server_app.py", *IMPORTS)
    return app


def check_account(folder: Path) -> None:
    """Two rounds over everybody, whose sums were opened and paid for, and a guarantee that trusts no server."""
    run = run_folder_of(folder)
    assert [row["replies"] for row in run.read_metrics()] == [NODES] * ROUNDS
    assert DurableLedger(run.ledger_path).spent("user").num_releases == ROUNDS
    facts = json.loads((run.path / "privacy.json").read_text())["guarantees"]
    (user,) = (each for each in facts if each["enabled"])
    assert user["adjacency"].startswith("zero-out")
    assert user["trusted"].startswith("not the server")
    assert user["epsilon"]["rdp"] == pytest.approx(8, abs=0.01)


def test_the_guide_shows_the_lines_that_the_quickstart_needs() -> None:
    for old, new in (CLIENT, SERVER):
        for line in {*new.splitlines()} - {*old.splitlines()}:
            assert f"+{line}" in GUIDE.read_text()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """SuperNodes with keys, accounts and the list of their peers."""
    with federation_of(demonstration(NODES), tmp_path / "federation") as federation:
        yield federation


@pytest.mark.slow
def test_an_app_of_somebody_else_trains_under_secure_aggregation_on_nodes_with_keys_of_their_own(
    federation: Federation, tmp_path: Path
) -> None:
    words = ["flwr", "run", str(secure_copy(tmp_path)), CONNECTION, "--stream", "--run-config", CONFIG]
    process = federation.start("app", words)
    wait_until(lambda: process.poll() is not None, RUN_SECONDS, "flwr run is over")
    assert f"round {ROUNDS}/{ROUNDS}  accuracy" in federation.says("app")
    check_account(federation.folder)
    for number in range(NODES):  # each has paid by its own count
        assert DurableLedger(federation.folder / f"node-{number}.db").spent("user").num_releases == ROUNDS
