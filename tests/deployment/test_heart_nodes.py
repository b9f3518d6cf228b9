"""A hospital's own node holds what the simulation gives it, and refuses what its policy does not allow."""

from __future__ import annotations

from pathlib import Path

import torch

from discreet.data.datasets import load_task
from discreet.data.heart import HOSPITALS
from discreet.data.partition import client_examples
from discreet.deployment.heart_nodes import main
from discreet.node.node_data import node_table
from discreet.node.policy import policy_from
from discreet.settings.data import DataConfig

BY_HOSPITAL = DataConfig(name="heart", num_clients=4, partition="natural")


def made(shared_data: Path, out: Path, *words: str) -> Path:
    files = [str(shared_data / "heart" / f"processed.{name}.data") for name in HOSPITALS]
    assert main([*files, "--out", str(out), *words]) == 0
    return out


def test_a_node_reads_the_patients_that_the_simulation_deals_to_it(shared_data: Path, tmp_path: Path) -> None:
    nodes, task = made(shared_data, tmp_path), load_task("heart", path=str(shared_data / "heart"))
    for number, name in enumerate(HOSPITALS):
        own, dealt = node_table(nodes / name, "heart")[0], client_examples(task, BY_HOSPITAL, number)
        assert torch.equal(own.inputs, dealt.inputs)
        assert torch.equal(own.targets, dealt.targets)


def test_a_node_is_made_from_its_own_file_alone_with_the_policy_that_the_hospital_said(
    shared_data: Path, tmp_path: Path
) -> None:
    allowed = ("--max-epsilon", "2.5", "--max-delta", "0.0005")
    alone = tmp_path / "processed.va.data"
    alone.write_text((shared_data / "heart" / "processed.va.data").read_text())
    assert main([str(alone), "--out", str(tmp_path / "alone"), *allowed]) == 0
    together = made(shared_data, tmp_path / "together", *allowed)
    policy = policy_from({"policy": str(together / "va" / "policy.json")})
    assert (policy.max_epsilon, policy.max_delta, policy.require) == (2.5, 0.0005, ("example",))
    for file in ("train.csv", "data.toml", "policy.json"):
        assert (tmp_path / "alone" / "va" / file).read_bytes() == (together / "va" / file).read_bytes()
