"""The quickstart as its authors run it, and with a private server: in the clear, and under secure
aggregation."""

from __future__ import annotations

import difflib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.cli.status import status_facts
from discreet.deployment.flower_home import (
    CONNECTION,
    flower_environment,
    wait_until,
    write_connection,
)
from discreet.deployment.flower_run import simulation_superlink
from discreet.deployment.local_federation import Federation, demonstration, federation_of
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.run_folder import RunFolder

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
RUN_SECONDS = 550
SERVER, PRIVATE = (
    QUICKSTART / "quickstart" / f"{name}.py" for name in ("server_app", "server_app_private")
)
MOST_LINES = 10
DELTA, ROUNDS, NODES, FRACTION = 1e-3, 2, 2, 0.5
CONFIG = f"num-server-rounds={ROUNDS} fraction-train={FRACTION} local-epochs=1"


def difference(before: Path, after: Path) -> list[str]:
    """The lines that are removed and added; a line that is empty is no line."""
    lines = difflib.unified_diff(
        before.read_text().splitlines(), after.read_text().splitlines(), lineterm="", n=0
    )
    return [
        line for line in lines if not line.startswith(("---", "+++", "@@")) and line[1:].strip()
    ]


def check_account(folder: RunFolder) -> None:
    """The published epsilon is dp-accounting's of the settings, the ledger's, and that of the last
    row of metrics."""
    noise, rounds = folder.read_config().privacy.user.noise_multiplier, len(folder.read_metrics())
    event = PoissonSampledDpEvent(FRACTION, GaussianDpEvent(noise))
    expected = PLDAccountant().compose(event, rounds).get_epsilon(DELTA)
    (user,) = (
        each
        for each in json.loads((folder.path / "privacy.json").read_text())["guarantees"]
        if each["enabled"]
    )
    ledger = DurableLedger(folder.ledger_path).spent("user").epsilon(DELTA)
    said = [user["epsilon"]["pld"], ledger, folder.read_metrics()[-1]["epsilon_user"]]
    assert said == pytest.approx([expected] * 3, rel=1e-3)


def test_a_private_server_differs_in_at_most_ten_lines_and_the_pages_show_them() -> None:
    lines = difference(SERVER, PRIVATE)
    assert 0 < len(lines) <= MOST_LINES
    for page in (ROOT / "README.md", QUICKSTART / "README.md"):
        assert "\n".join(lines) in page.read_text()


def test_the_private_quickstart_runs_and_its_ledger_is_the_accountants(tmp_path: Path) -> None:
    said = run_simulated(private_copy(tmp_path), tmp_path, nodes=NODES, config=CONFIG)
    folder = run_folder_of(tmp_path)
    assert f"round {ROUNDS}/{ROUNDS}  accuracy" in said
    assert "metrics and numbers of examples that clients report are not read" in said
    check_account(folder)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(8, abs=0.01)
    assert all(row["replies"] == row["cohort"] for row in folder.read_metrics())
    assert status_facts(folder)["state"] == "finished"
    assert (tmp_path / "final_model.pt").exists()


def private_copy(folder: Path) -> Path:
    """A copy of the quickstart with its file server_app_private.py as its server."""
    copied = folder / "app"
    shutil.copytree(QUICKSTART, copied, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    (other,) = copied.rglob("server_app_private.py")
    other.replace(other.with_name("server_app.py"))
    return copied


def run_simulated(app: Path, folder: Path, *, nodes: int, config: str) -> str:
    """The output of the app in Flower's simulation; its ServerApp runs in `folder`."""
    resources = f"num-supernodes={nodes} client-resources-num-cpus=1"
    with simulation_superlink(folder) as (address, home, _):
        write_connection(home, address=address, authority=None)
        flwr, words = (
            Path(sys.executable).with_name("flwr"),
            ["--federation-config", resources, "--run-config", config],
        )
        with (home / "run.log").open("w") as log:
            command = [str(flwr), "run", str(app), CONNECTION, "--stream", *words]
            environment = flower_environment(home)
            done = subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=RUN_SECONDS, check=False
            )
        said = (home / "run.log").read_text(errors="replace")
    assert done.returncode == 0, said
    return said


def run_folder_of(folder: Path) -> RunFolder:
    """The run folder that a private server left where it ran."""
    (found,) = (folder / "outputs").iterdir()
    return RunFolder(found)


GUIDE = ROOT / "docs" / "guide" / "flower_app.md"
MASKING_NODES, MASKED_ROUNDS = 4, 2
SECURE_CONFIG = f"num-server-rounds={MASKED_ROUNDS} fraction-train=1.0 local-epochs=1"
IMPORTS = (
    "from discreet import DPFedAvg\n",
    "from discreet import AdaptiveClipping, DPFedAvg, MaskedGaussian\n",
)
CLIENT_LINES = ("app = ClientApp()\n", "app = ClientApp(mods=[discreet.secure_sum_mod])\n")
SERVER_LINES = (
    "        population_size=100,\n        target_epsilon=8.0,\n        delta=1e-3,\n        "
    "clip_norm=1.0,\n",
    f"        population_size={MASKING_NODES},\n"
    f"        min_available_nodes={MASKING_NODES},\n"
    '        sampling="everyone",\n'
    "        mechanism=MaskedGaussian(\n"
    "            target_epsilon=8.0, delta=1e-3, clipping=AdaptiveClipping(norm=1.0), "
    'too_noisy="warn"\n'
    "        ),\n",
)


def replaced(path: Path, old: str, new: str) -> None:
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def secure_copy(folder: Path) -> Path:
    """The private quickstart with the lines that the guide adds."""
    app = private_copy(folder)
    client = app / "quickstart" / "client_app.py"
    replaced(client, *CLIENT_LINES)
    replaced(client, "from flwr.app import", "import discreet\nfrom flwr.app import")
    replaced(app / "quickstart" / "server_app.py", *SERVER_LINES)
    replaced(app / "quickstart" / "server_app.py", *IMPORTS)
    return app


def check_masked_account(folder: Path) -> None:
    """Two rounds over everybody, whose sums were opened and paid for, and a guarantee that trusts
    no server."""
    run = run_folder_of(folder)
    assert [row["replies"] for row in run.read_metrics()] == [MASKING_NODES] * MASKED_ROUNDS
    assert DurableLedger(run.ledger_path).spent("user").num_releases == MASKED_ROUNDS
    facts = json.loads((run.path / "privacy.json").read_text())["guarantees"]
    (user,) = (each for each in facts if each["enabled"])
    assert user["adjacency"].startswith("zero-out")
    assert user["trusted"].startswith("not the server")
    assert user["epsilon"]["rdp"] == pytest.approx(8, abs=0.01)


def test_the_guide_shows_the_lines_that_the_quickstart_needs() -> None:
    for old, new in (CLIENT_LINES, SERVER_LINES):
        for line in {*new.splitlines()} - {*old.splitlines()}:
            assert f"+{line}" in GUIDE.read_text()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """SuperNodes with keys, accounts and the list of their peers."""
    with federation_of(demonstration(MASKING_NODES), tmp_path / "federation") as federation:
        yield federation


@pytest.mark.slow
def test_another_app_trains_under_secure_aggregation_on_nodes_with_their_own_keys(
    federation: Federation, tmp_path: Path
) -> None:
    words = [
        "flwr",
        "run",
        str(secure_copy(tmp_path)),
        CONNECTION,
        "--stream",
        "--run-config",
        SECURE_CONFIG,
    ]
    process = federation.start("app", words)
    wait_until(lambda: process.poll() is not None, RUN_SECONDS, "flwr run is over")
    assert f"round {MASKED_ROUNDS}/{MASKED_ROUNDS}  accuracy" in federation.says("app")
    check_masked_account(federation.folder)
    for number in range(MASKING_NODES):  # each has paid by its own count
        assert (
            DurableLedger(federation.folder / f"node-{number}.db").spent("user").num_releases
            == MASKED_ROUNDS
        )
