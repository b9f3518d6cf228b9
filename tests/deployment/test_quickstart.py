"""Flower apps as their authors begin them, and with a private server: the quickstart."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.cli.status import status_facts
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.run_folder import RunFolder
from tests.deployment.app_runs import QUICKSTART, ROOT, private_copy, run_folder_of, run_simulated

SERVER, PRIVATE = (QUICKSTART / "quickstart" / f"{name}.py" for name in ("server_app", "server_app_private"))
MOST_LINES = 10
DELTA, ROUNDS, NODES, FRACTION = 1e-3, 2, 2, 0.5
CONFIG = f"num-server-rounds={ROUNDS} fraction-train={FRACTION} local-epochs=1"


def difference(before: Path, after: Path) -> list[str]:
    """The lines that are removed and added; a line that is empty is no line."""
    lines = difflib.unified_diff(before.read_text().splitlines(), after.read_text().splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@")) and line[1:].strip()]


def check_account(folder: RunFolder) -> None:
    """The published epsilon is dp-accounting's of the settings, the ledger's, and that of the last row of metrics."""
    noise, rounds = folder.read_config().privacy.user.noise_multiplier, len(folder.read_metrics())
    assert noise is not None
    event = PoissonSampledDpEvent(FRACTION, GaussianDpEvent(noise))
    expected = PLDAccountant().compose(event, rounds).get_epsilon(DELTA)
    (user,) = (each for each in json.loads((folder.path / "privacy.json").read_text())["guarantees"] if each["enabled"])
    ledger = DurableLedger(folder.ledger_path).spent("user").epsilon(DELTA)
    said = [user["epsilon"]["pld"], ledger, folder.read_metrics()[-1]["epsilon_user"]]
    assert said == pytest.approx([expected] * 3, rel=1e-3)


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
    check_account(folder)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(8, abs=0.01)
    assert all(row["replies"] == row["cohort"] for row in folder.read_metrics())
    assert status_facts(folder)["state"] == "finished"
    assert (tmp_path / "final_model.pt").exists()
