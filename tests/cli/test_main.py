"""The command `discreet`: its verbs, their help, and what it takes to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import per_example_speed as per_example
from discreet.cli.main import ANYWHERE, IN_A_PROJECT, main

VERBS = ANYWHERE | IN_A_PROJECT
LOADED = "import sys; from discreet.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"


def test_every_verb_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{verb} {line}" in shown for verb, line in VERBS.items())


WRONG = {
    "simulated": "No such command 'simulated'. Did you mean 'simulate'?",
    "ledger shwo run": "Invalid value for 'ACTION:",
    "status": "Missing argument 'RUN'.",
    "status run --jsno": "No such option '--jsno'. Did you mean '--json'?",
    "run --rounds 5": "No such option '--rounds'. A setting has no dashes: write NAME=VALUE",
}


def test_words_that_are_wrong_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in WRONG.items():
        assert main(words.split()) == 2
        refused = capsys.readouterr().err
        assert refused.startswith(f"discreet: {said}")
        assert refused.count("\n") == 1


HEAVY = {"torch", "flwr", "sklearn", "dp_accounting", "scipy", "numpy"}


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("--help", {*HEAVY, "hydra"}),
        ("status no/such/run", {*HEAVY, "hydra"}),
        ("simulate training.learnig_rate=1", HEAVY),
        ("simulate --multirun rounds=0,2", HEAVY),
        ("tune rouns=1,2", HEAVY),
        ("calibrate user --population 100 --cohort 10 --rounds 1 --noise 1", {"torch", "flwr", "sklearn"}),
    ],
)
def test_a_command_starts_without_what_it_does_not_need(words: str, unneeded: set[str]) -> None:
    command = [sys.executable, "-c", LOADED, *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not unneeded & set(ran.stdout.split())


def test_sections_are_written_as_json_and_an_unknown_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(per_example, "rows", lambda: [{"what": "something", "ms": 1.5}])
    assert main(["benchmark", "per_example", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["per_example"] == [{"what": "something", "ms": 1.5}]
    assert written["machine"]["cores"] >= 1
    assert main(["benchmark", "weather"]) == 2
    assert "no section weather; known are per_example, loop" in capsys.readouterr().err
