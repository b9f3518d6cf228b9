"""The commands of the README are commands: scripts exist, overrides compose, small ones run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from discreet.cli.main import ANYWHERE, IN_A_PROJECT
from discreet.settings.compose import load_config
from tests.command import calibrate

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Each line of a page's bash blocks, as words; a line that ends in a backslash goes on."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


VERBS = ANYWHERE | IN_A_PROJECT
LINES = [words for page in PAGES for words in commands(page)]


def overrides_of(words: list[str]) -> list[str]:
    """The Hydra overrides of a command that takes them; of a sweep the first value of each."""
    if words[0] == "scripts/run" or words[:2] in (["discreet", "run"], ["discreet", "simulate"]):
        given = [word for word in words if re.match(r"^[\w.]+=", word)]
        return [word.split(",")[0] if "--multirun" in words and "[" not in word else word for word in given]
    if words[:2] == ["flwr", "run"] and "--run-config" in words:
        text = words[words.index("--run-config") + 1]
        return shlex.split(re.sub(r"^overrides=", "", text).strip('"'))
    return []


def test_a_command_names_what_is_there() -> None:
    assert len(commands(ROOT / "README.md")) >= 10
    for words in LINES:
        if words[0].startswith("scripts/"):
            assert (ROOT / words[0]).exists(), words
        if words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists(), words
        if words[0] == "discreet":
            assert words[1] in VERBS, words


def test_the_overrides_of_a_command_compose() -> None:
    every = {tuple(word for word in overrides_of(words) if not word.startswith("hydra")) for words in LINES}
    for given in every - {()}:
        assert load_config([*given], of_sweep=any(word.endswith("_sweep") for word in given)).rounds >= 1


@pytest.mark.parametrize("words", [words for words in LINES if words[:2] == ["discreet", "calibrate"]])
def test_calibrate_answers(words: list[str]) -> None:
    assert calibrate(words[2:]) == 0
