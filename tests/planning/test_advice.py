"""Five questions: where to start, the expected noise by an oracle, and honest words."""

from __future__ import annotations

import csv
import math
import re
import statistics
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.planning.advice import CODE, MEASURED, TRUSTED, Situation, advice
from discreet.settings.rules import ConfigError
from tests.command import advise

ROOT = Path(__file__).resolve().parent.parent.parent
EXPERIMENTS = {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}


def said(clients: int, rows: int, person: int, trusted: str, code: str) -> str:
    return "\n".join(advice(Situation(clients, rows, person, trusted, code)))


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("trusted", TRUSTED)
@pytest.mark.parametrize("clients", [1, 3, 40, 100, 5000])
def test_every_situation_has_a_start_that_is_there_two_noises_and_an_expectation(
    clients: int, trusted: str, code: str
) -> None:
    text = said(clients, 6000, 2, trusted, code)
    (start,) = re.findall(r"^start from: (.*)$", text, flags=re.MULTILINE)
    assert {*re.findall(r"experiment=(\w+)", text)} <= EXPERIMENTS
    for page in re.findall(r"docs/[\w/]+\.\w+", text):
        assert (ROOT / page).is_file(), page
    assert ("DPSGD" in start) or code != "loop"
    assert len(re.findall(r"noise of [\d.e+-]+ clip norms", text)) == 2
    assert text.count("; expect ") == 2


def test_the_noise_of_patients_as_clients_is_that_of_the_experiment() -> None:
    found = [
        float(each)
        for each in re.findall(r"noise of ([\d.]+)", said(897, 2400, 20, "server", "command"))
    ]
    for epsilon, ratio in zip((8, 2), found, strict=True):
        noise = ratio * 0.3 * 897 / math.sqrt(50)
        event = PoissonSampledDpEvent(0.3, GaussianDpEvent(noise))
        spent = PLDAccountant().compose(event, 100).get_epsilon(1e-4)
        assert spent == pytest.approx(epsilon, rel=0.05)  # two digits are printed


def test_three_hospitals_are_told_what_does_not_work_and_what_does() -> None:
    text = said(3, 3000, 1, "nobody", "command")
    assert "experiment=heart " in text
    assert "a whole organisation among 3" in text
    assert "only a small model may learn" in text
    assert "four hospitals of 30 to 199 patients reach 78 % accuracy at epsilon 2" in text
    assert "is NOT protected" not in text
    several = said(3, 3000, 4, "most", "command")
    assert "a person with 4 rows is NOT protected at that epsilon unless" in several
    assert "privacy.example.unit=owner (experiment=hospitals)" in several


def test_one_organisation_is_one() -> None:
    assert "1 organisation of 300 rows on average" in said(1, 300, 1, "nobody", "command")


def test_hospitals_with_several_rows_a_patient_start_where_a_patient_is_the_unit() -> None:
    text = said(3, 3000, 4, "nobody", "command")
    assert "start from: experiment=hospitals," in text
    assert "protects: one person of one organisation with all rows" in text
    assert "organisations of at least 250 people" in text
    assert "is NOT protected" not in text
    with (ROOT / "docs" / "results" / "hospitals.csv").open() as file:
        found = [float(row["auc"]) for row in csv.DictReader(file) if row["normalise"] == "spread"]
    assert f"AUC of {statistics.median(found):.3f} at epsilon 2" in text
    assert f"median of {len(found)} runs, the lowest {min(found):.3f}" in text


def test_what_is_expected_is_what_was_measured() -> None:
    with (ROOT / "docs" / "results" / "table_choice.csv").open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["rounds"] == "100" and row["learning_rate"] == "0.5"
        ]
    chosen = [
        row for row in rows if (row["clip_norm"], row["sampling_probability"]) == ("0.5", "0.3")
    ]
    lost = {
        (row["table"], float(row["epsilon"])): float(row["auc_pooled"]) - float(row["auc"])
        for row in chosen
    }
    assert len(lost) == 10
    assert max(value for (_, epsilon), value in lost.items() if epsilon == 8) < 0.02
    assert max(lost.values()) < 0.06
    assert [most for most, _ in MEASURED] == sorted(most for most, _ in MEASURED)


def test_answers_that_can_not_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--rows .*at least 10"):
        Situation(10, 9, 1, "server", "command")
    words = [
        "--clients",
        "0",
        "--rows",
        "5",
        "--rows-a-person",
        "1",
        "--trusted",
        "server",
        "--code",
        "loop",
    ]
    assert advise(words) == 2
    assert capsys.readouterr().err == "discreet: --clients must be at least 1 (got 0)\n"
