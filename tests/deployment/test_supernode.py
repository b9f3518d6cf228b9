"""A node is checked before it connects: its data, its policy, its ledger."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from discreet.deployment.flower_fixes.commands import LONGEST_PAUSE
from discreet.deployment.flower_fixes.hand_over import SOCKET_VARIABLE
from discreet.deployment.supernode import main
from tests.node.clients import ledger_at

COMMON = ("--superlink", "fl.example.org:9092", "--authority", "ca.crt", "--key", "node.key")


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that this process would have become."""
    commands: list[list[str]] = []

    def become(_: str, words: list[str]) -> int:
        commands.append(words)
        return 0

    monkeypatch.setattr(os, "execvp", become)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv(SOCKET_VARIABLE, "one that runs already")
    monkeypatch.setenv(LONGEST_PAUSE, "")
    return commands


def start(folder: Path, *words: str) -> int:
    ledger_at(folder / "ledger.db")
    return main([*COMMON, "--ledger", str(folder / "ledger.db"), *words])


def test_a_checked_node_becomes_a_supernode_with_its_configuration(
    tmp_path: Path, executed: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.json").write_text('{"max-epsilon": 3, "max-delta": 0.001, "public-num-examples": 300}')
    words = ("--partition", "1", "--of", "4", "--policy", str(tmp_path / "policy.json"))
    assert start(tmp_path, *words, "--longest-pause", "20") == 0
    assert os.environ[LONGEST_PAUSE] == "20.0"
    assert "public-num-examples=300: its guarantee is add or remove one example" in capsys.readouterr().out
    (command,) = executed
    assert command[:3] == [sys.executable, "-m", "discreet.deployment.flower_fixes.commands"]
    assert "--insecure" not in command
    config = parse_config_args([command[command.index("--node-config") + 1]])
    assert config == {
        "ledger": str(tmp_path / "ledger.db"),
        "partition-id": 1,
        "num-partitions": 4,
        "policy": str(tmp_path / "policy.json"),
    }


PLACE = ("--partition", "0", "--of", "1")


@pytest.mark.parametrize(
    ("folder", "words", "message"),
    [
        ("a", (), "give either --data FOLDER or --partition"),
        ("a", ("--partition", "4", "--of", "4"), "--partition must be within 0 and --of"),
        ("a", (*PLACE, "--policy", "/nowhere.json"), "--policy:"),
        ("a", (*PLACE, "--policy", "wrong.json"), "max-epsilom"),
        ("a", ("--data", "/nowhere", "--task", "digits"), r"data.toml is missing"),
        ("a", (*PLACE, "--longest-pause", "61"), "(got 61)"),
        ('a"b', PLACE, "quotation mark"),  # a path that Flower would read wrongly
    ],
)
def test_what_is_wrong_is_said_before_anything_connects(
    folder: str,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    executed: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text('{"max-epsilom": 3}')
    (tmp_path / folder).mkdir()
    assert start(tmp_path / folder, *words) == 2
    assert message in capsys.readouterr().out
    assert main([*COMMON, "--ledger", str(tmp_path / "none.db"), *PLACE]) == 2
    assert "none.db is missing: put the ledger back" in capsys.readouterr().out
    assert not (tmp_path / "none.db").exists()
    assert executed == []
