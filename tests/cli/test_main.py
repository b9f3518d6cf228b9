"""The command `discreet`: its verbs, their help, and what it takes to start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from discreet.cli.main import ANYWHERE, IN_A_PROJECT, main

CLI = Path(__file__).resolve().parent.parent.parent / "discreet" / "cli"
VERBS = ANYWHERE | IN_A_PROJECT
LOADED = "import sys; from discreet.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"


def test_every_verb_is_a_file_and_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(f"  {verb:10} {line}" in lines for verb, line in VERBS.items())
    assert {path.stem for path in CLI.glob("*.py")} - {"__init__", "main"} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([verb, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    assert f"  discreet {verb} " in capsys.readouterr().out


def test_no_words_are_a_question_for_help_and_a_verb_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: discreet VERB")
    assert main(["simulated"]) == 2
    assert capsys.readouterr().err.startswith("discreet: there is no verb simulated; there are calibrate, report, ")


@pytest.mark.parametrize("words", [["--help"], ["status", "no/such/run"]])
def test_help_and_status_start_without_torch_and_without_flower(words: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, check=True)
    assert not {"torch", "flwr", "numpy", "hydra"} & set(ran.stdout.split())
