"""The commands that start a whole federation run, small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import RUN_SECONDS, Federation, main
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.server.run_folder import RunFolder, state_of
from discreet.simulation.processes import RunLostError
from tests.scripts.living import MARK, default_signals, marked


def test_a_node_that_ends_at_its_start_is_not_waited_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.start("node-0", [sys.executable, "-c", "print('first'); print('no room'); raise SystemExit(3)"])
    with pytest.raises(RunLostError, match="node-0 has ended with 3 before it was connected; it said last: no room"):
        federation.wait_for_nodes(["node-0"])


USER_LEVEL = (
    *("privacy.user.enabled=true", "privacy.example.enabled=false", "privacy.example.noise_multiplier=null"),
    *("privacy.example.max_epsilon=null", "privacy.user.noise_multiplier=1.5", "privacy.user.too_noisy=warn"),
    *("sampling.population_name=people", "privacy.delta=0.01", "data.normalise=private"),
)


@pytest.mark.slow
def test_runs_on_nodes_that_normalise_charge_one_account_up_to_its_limit(tmp_path: Path) -> None:
    path, asked, round_ = tmp_path / "people.db", GaussianDpEvent(2.0), GaussianDpEvent(1.5)
    two = PLDAccountant().compose(asked).compose(round_, 2).get_epsilon(0.01)
    create_account(path, Population("people", 2, ADJACENCIES[0], 0.01), max_epsilon=two + 0.01)
    words = [*USER_LEVEL, "statistics.noise_multiplier=2", f"privacy.user.account={path}"]
    for name, code in (("first", 0), ("second", 1)):
        assert main(["--nodes", "2", "rounds=3", f"output_dir={tmp_path / name}", *words]) == code
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    (data_owner,) = DurableLedger(path).data_owners("user")
    assert dict(DurableLedger(path).spent("user", data_owner=data_owner).entries) == {asked: 1, round_: 2}
    assert [row["replies"] for row in first.read_metrics()] == [2, 2]
    assert len(first.read_config().normaliser.means or []) == 1
    assert DurableLedger(second.ledger_path).releases() == []  # it could not even ask
    assert (first.path / "privacy.json").exists()


@pytest.mark.slow
def test_ctrl_c_ends_every_process_of_a_federation_on_this_machine(tmp_path: Path) -> None:
    run, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    words = ["--nodes", "2", "rounds=500", f"output_dir={run.path}"]
    command = [sys.executable, "-m", "discreet.deployment.local_federation", *words]
    process = subprocess.Popen(
        command, env=os.environ | {MARK: mark}, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    )
    try:
        wait_until(lambda: run.load_checkpoint() or process.poll() is not None, RUN_SECONDS, "a round is done")
        assert len(marked(mark)) > 8
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert marked(mark) == []
    assert state_of(run) == "interrupted"
    go_on = f"to go on: python -m discreet.deployment.local_federation --nodes 2 resume=true output_dir={run.path}"
    assert errors.splitlines()[-1].endswith(go_on)
