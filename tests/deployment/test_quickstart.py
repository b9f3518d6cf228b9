"""Flower apps as their authors begin them, and with a private server: the quickstart, and one with a NumPyClient."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.cli.status import status_facts
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.run_folder import RunFolder
from tests.deployment.app_runs import QUICKSTART, ROOT, private_copy, run_folder_of, run_simulated

NUMPY_APP = ROOT / "tests" / "deployment" / "numpy_app"
SERVER, PRIVATE = (QUICKSTART / "quickstart" / f"{name}.py" for name in ("server_app", "server_app_private"))
MOST_LINES = 10
DELTA, ROUNDS, NODES, FRACTION = 1e-3, 2, 2, 0.5
CONFIG = f"num-server-rounds={ROUNDS} fraction-train={FRACTION} local-epochs=1"


def difference(before: Path, after: Path) -> list[str]:
    """The lines that are removed and added; a line that is empty is no line."""
    lines = difflib.unified_diff(before.read_text().splitlines(), after.read_text().splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@")) and line[1:].strip()]


def epsilon_of(folder: RunFolder, probability: float) -> float:
    """The epsilon of a run by dp_accounting alone, from its settings and the number of its rounds."""
    noise = folder.read_config().privacy.user.noise_multiplier
    assert noise is not None
    event = GaussianDpEvent(noise) if probability == 1 else PoissonSampledDpEvent(probability, GaussianDpEvent(noise))
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(event, len(folder.read_metrics())))
    return float(accountant.get_epsilon(DELTA))


def check_account(folder: RunFolder, probability: float) -> None:
    """The published epsilon is the accountant's, the ledger's, and that of the last row of the metrics."""
    (user,) = (each for each in json.loads((folder.path / "privacy.json").read_text())["guarantees"] if each["enabled"])
    expected = epsilon_of(folder, probability)
    assert user["epsilon"]["pld"] == pytest.approx(expected, rel=1e-3)
    assert DurableLedger(folder.ledger_path).spent("user").epsilon(DELTA) == pytest.approx(expected, rel=1e-3)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(expected, rel=1e-3)


def test_a_private_server_is_a_difference_of_at_most_ten_lines_and_the_pages_show_them() -> None:
    lines = difference(SERVER, PRIVATE)
    assert 0 < len(lines) <= MOST_LINES
    for page in (ROOT / "README.md", QUICKSTART / "README.md"):
        assert "\n".join(lines) in page.read_text()


def test_the_private_quickstart_runs_and_its_ledger_is_the_accountants(tmp_path: Path) -> None:
    said = run_simulated(private_copy(tmp_path), tmp_path, nodes=NODES, config=CONFIG)
    folder = run_folder_of(tmp_path)
    assert f"round {ROUNDS}/{ROUNDS}  accuracy" in said
    assert "metrics and numbers of examples that clients report are not read" in said
    check_account(folder, FRACTION)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(8, abs=0.01)
    assert all(row["replies"] == row["cohort"] for row in folder.read_metrics())
    assert status_facts(folder)["state"] == "finished"
    assert (tmp_path / "final_model.pt").exists()


@pytest.mark.slow
def test_an_app_with_a_numpy_client_runs_privately(tmp_path: Path) -> None:
    said = run_simulated(NUMPY_APP, tmp_path, nodes=2, config="num-server-rounds=2")
    assert "replies 2/2" in said
    # Flower's own strategy gives them the numbers that such a client has for names.
    assert "trained ['0.bias', '0.weight', '3.bias', '3.weight']" in said
    check_account(run_folder_of(tmp_path), 1.0)
