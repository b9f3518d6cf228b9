"""Four hospitals as real nodes: each with its own file, ledger and policy, and one that refuses
what that forbids."""

from __future__ import annotations

from pathlib import Path

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from discreet.cli.status import status_lines
from discreet.data.folder import node_table
from discreet.data.heart import HOSPITALS
from discreet.deployment.local_federation import main
from discreet.ledger.durable_ledger import DurableLedger
from discreet.node.nodes import share_of
from discreet.run_files.run_folder import RunFolder, state_of
from discreet.settings.data import DataConfig
from examples.heart.make_nodes import main as make_nodes

ROUNDS, NOISE = 2, 1.5
STRICT = "switzerland"


def spent_by_dp_accounting(rounds: int) -> float:
    """The epsilon of a hospital for a patient: steps over all patients, without sampling."""
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(NOISE), rounds)
    return float(PLDAccountant().compose(event).get_epsilon(1e-3))


def made(shared_data: Path, out: Path) -> Path:
    files = [str(shared_data / "heart" / f"processed.{name}.data") for name in HOSPITALS]
    assert make_nodes([*files, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_three_hospitals_train_and_the_one_whose_policy_allows_less_refuses(
    shared_data: Path, tmp_path: Path
) -> None:
    nodes, run = made(shared_data, tmp_path / "nodes"), RunFolder(tmp_path / "run")
    (nodes / STRICT / "policy.json").write_text('{"max-epsilon": 1, "max-delta": 0.001}')
    words = (
        "experiment=heart",
        f"privacy.example.noise_multiplier={NOISE}",
        "privacy.example.target_epsilon=null",
    )
    words = (
        *words,
        f"data.path={shared_data / 'heart'}",
        f"rounds={ROUNDS}",
        f"output_dir={run.path}",
    )
    assert main(["--data", str(nodes), *words]) == 0
    assert state_of(run) == "finished"
    assert [row["replies"] for row in run.read_metrics()] == [3, 3]
    assert any("refused 2" in line for line in status_lines(run))
    for number, name in enumerate(HOSPITALS):  # which is also their order by name
        spent = (
            DurableLedger(run.path / "nodes" / f"node-{number}.db")
            .spent("example")
            .epsilon(1e-3, "pld")
        )
        assert spent == pytest.approx(
            0 if name == STRICT else spent_by_dp_accounting(ROUNDS), rel=1e-3
        )


def test_a_node_reads_the_patients_that_the_simulation_deals_to_it(
    shared_data: Path, tmp_path: Path
) -> None:
    nodes, raw = made(shared_data, tmp_path), str(shared_data / "heart")
    by_hospital = DataConfig(name="heart", num_clients=4, partition="natural")
    for number, name in enumerate(HOSPITALS):
        own, dealt = node_table(nodes / name, "heart")[0], share_of(by_hospital, number, path=raw)
        assert torch.equal(own.inputs, dealt.inputs)
        assert torch.equal(own.targets, dealt.targets)
