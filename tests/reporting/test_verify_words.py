"""What the command examples/verify/verify.py says of its words and of files that it can't read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest

from discreet.ledger.durable_ledger import DurableLedger
from examples.verify.verify import main
from tests.conftest import REPOSITORY
from tests.reporting.test_verify import lines, made

SCRIPT = REPOSITORY / "examples" / "verify" / "verify.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("made") / "run", "sampling.kind=everyone")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.db"], "nowhere.db can't be verified: "),
        (["."], "ledger.db'"),
        (["text.md"], "text.md can't be verified: file is not a database"),
        (["run", "nowhere.md"], "nowhere.md'"),
        (["bare"], "privacy.json'"),
        (["run/ledger.db", "1,5"], "could not convert string to float: '1,5'"),
        ([], "verify.py LEDGER.db [DELTA]"),
    ],
)
def test_what_can_not_be_read_is_named_in_one_sentence(
    words: list[str], said: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.md").write_text("no ledger " * 200)
    (tmp_path / "run").symlink_to(run)
    (tmp_path / "bare").mkdir()
    copy(run / "ledger.db", tmp_path / "bare")
    command = [sys.executable, str(SCRIPT), *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "verify.py LEDGER.db [DELTA]" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_delta_of_the_command_counts_for_a_ledger_that_has_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "ledger.db"
    own, asked = (lines(capsys, path, *words)[3] for words in ([], ["1e-6"]))
    assert "at delta 0.001" in own
    assert "at delta 1e-06" in asked
    epsilons = [float(re.findall(r"at most ([\d.]+)", said)[0]) for said in (own, asked)]
    assert epsilons[1] > 1.1 * epsilons[0]


def test_a_ledger_that_has_no_delta_needs_one(tmp_path: Path) -> None:
    DurableLedger.create(tmp_path / "ledger.db")
    with pytest.raises(ValueError, match="DELTA"):
        main(str(tmp_path / "ledger.db"))


def test_it_is_short_and_imports_nothing_of_discreet() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 150
    imported = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    standard = {"csv", "hashlib", "json", "logging", "math", "re", "sqlite3", "sys"}
    assert imported - standard == {"collections", "pathlib", "dp_accounting"}


def test_a_card_that_is_empty_is_wrong(run: Path, tmp_path: Path) -> None:
    (tmp_path / "card.md").touch()
    assert main(str(run), str(tmp_path / "card.md")) == 1
