"""A hospital's own node holds what the simulation gives it, and refuses what its policy does not allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from discreet.client.node_data import node_table
from discreet.client.policy import policy_from
from discreet.client_settings import DataConfig
from discreet.config import ConfigError
from discreet.deployment.heart_nodes import main
from discreet.deployment.local_federation import owned
from discreet.tasks.datasets import load_task
from discreet.tasks.heart import HOSPITALS
from discreet.tasks.partition import client_examples

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


def test_a_node_is_made_from_its_own_file_alone(shared_data: Path, tmp_path: Path) -> None:
    alone = tmp_path / "processed.va.data"
    alone.write_text((shared_data / "heart" / "processed.va.data").read_text())
    assert main([str(alone), "--out", str(tmp_path / "alone")]) == 0
    together = made(shared_data, tmp_path / "together")
    for file in ("train.csv", "data.toml", "policy.json"):
        assert (tmp_path / "alone" / "va" / file).read_bytes() == (together / "va" / file).read_bytes()


def test_its_policy_is_what_the_hospital_said(shared_data: Path, tmp_path: Path) -> None:
    nodes = made(shared_data, tmp_path, "--max-epsilon", "2.5", "--max-delta", "0.0005")
    policy = policy_from({"policy": str(nodes / "va" / "policy.json")})
    assert (policy.max_epsilon, policy.max_delta, policy.require) == (2.5, 0.0005, ("example",))


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "processed.va.data"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"discreet: data.path: {tmp_path / 'processed.va.data'} is missing")


def test_each_folder_with_data_is_a_node_with_its_policy_if_it_has_one(tmp_path: Path) -> None:
    for name in ("b", "a", "notes"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "data.toml").write_text("")
    (tmp_path / "b" / "policy.json").write_text(json.dumps({}))
    a, b = (str((tmp_path / name).resolve()) for name in ("a", "b"))
    assert owned(tmp_path) == [["--data", a], ["--data", b, "--policy", f"{b}/policy.json"]]


def test_a_folder_without_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no folder with a data\.toml"):
        owned(tmp_path)
