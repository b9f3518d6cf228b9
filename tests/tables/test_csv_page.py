"""The page "From a CSV file": from a messy table to a report, an exported model and predictions, as
it says."""

from __future__ import annotations

import csv
import io
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest

from discreet.cli.main import main
from discreet.data.description import description_of
from tests.tables.made_tables import write_table
from tests.test_docs import commands

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "guide" / "csv.md"
PEOPLE = 150


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[number]


def shell(words: list[str], folder: Path) -> str:
    """What a command of the page prints: `discreet` in this process, whose start would take as long
    as most of its verbs, and any other as itself, with the `python` of this environment."""
    printed = io.StringIO()
    if words[0] == "discreet":
        with chdir(folder), redirect_stdout(printed):
            code = main(words[1:])
        assert code == 0, f"{shlex.join(words)}: {printed.getvalue()}"
        return printed.getvalue()
    line = [{"python": sys.executable}.get(words[0], words[0]), *words[1:]]
    done = subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder after every command of the page, in order, and what each printed."""
    folder, said = tmp_path_factory.mktemp("page"), dict[str, str]()
    write_table(folder / "hospital.csv", PEOPLE)
    people = "240"
    for words in commands(PAGE):
        if words[0] == "cd":
            folder = folder / words[1]
            words = words[3:] if "&&" in words else []
        if not words:
            continue
        words = [word.replace("=240", f"={people}") for word in words]
        words += ["rounds=5"] if words[1] == "simulate" else []
        said[" ".join(words[:3] if words[0] == "discreet" else words)] = printed = shell(
            words, folder
        )
        if words[1:3] == ["data", "check"] and "--write" in words:
            (folder / "data" / "data.toml").write_text(block("toml"))
        if found := re.search(
            r"(\d+) owners \(patient_id\), each of whom becomes a client", printed
        ):
            people = found[1]
    return folder, said


def test_each_command_of_the_page_runs_in_order(walked: tuple[Path, dict[str, str]]) -> None:
    _, said = walked
    assert len(said) >= 8
    assert (
        "unconfirmed = [" in said["discreet data check"] or "fits:" in said["discreet data check"]
    )
    assert "after the first round" in said["discreet plan experiment=table"]
    assert "round 5/5" in said["discreet simulate experiment=table"]
    assert "['no' 'yes']" in said["python example.py"]


def test_it_ends_with_a_report_an_exported_model_and_predictions(
    walked: tuple[Path, dict[str, str]],
) -> None:
    exported, project = walked[0], walked[0].parent
    assert exported.name == "exported"
    page = (project / "outputs" / "first" / "report.html").read_text()
    assert all(
        title in page
        for title in ("Confusion matrix", "ROC curve", "Calibration", "AUC after each round")
    )
    with (project / "predicted.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"row", "patient_id", "target", "prediction", "probability_no", "probability_yes"} <= {
        *rows[0]
    }
    assert (exported / "example.py").read_text() == block("python")


def test_the_description_on_the_page_is_one_that_check_could_have_proposed() -> None:
    described = description_of(tomllib.loads(block("toml")))
    assert [column.kind for column in described.columns] == [
        "number",
        "category",
        "category",
        "number",
        "date",
    ]
    assert described.unconfirmed == ()
