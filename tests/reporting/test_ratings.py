"""What the report and `discreet status` say of private evaluation: numbers, both standard errors, and the price."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.cli.status import status_facts, status_lines
from discreet.ledger.durable_ledger import Charge
from discreet.reporting.records import RunRecord, read_runs
from discreet.reporting.spending import ratings_cost
from discreet.server.plan import Plan
from discreet.server.run_folder import RunFolder
from tests.made_runs import make_run

WORDS = (
    *("privacy.user.noise_multiplier=2", "evaluation.kind=private", "evaluation.every=1"),
    *("evaluation.noise_multiplier=3", "sampling.probability=0.5"),
)
ERRORS = (0.05, 0.04)  # in all, by noise
SPENT = PLDAccountant().compose(PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0)), 2)


def rated_run(path: Path, *words: str, last: tuple[float, float, float] = (0.7, *ERRORS)) -> RunFolder:
    """Two rounds, each rated: the last one by `last`, a value with both errors."""
    folder = make_run(path, *WORDS, *words)
    folder.ledger(Plan(folder.read_config())).charge(
        [Charge(2, "user", "", PoissonSampledDpEvent(0.5, GaussianDpEvent(3.0)), 2)]
    )
    (first, second), spent = folder.read_metrics(), SPENT.compose(PoissonSampledDpEvent(0.5, GaussianDpEvent(3.0)), 2)
    names = ("accuracy", "accuracy_error", "accuracy_error_by_noise")
    first |= dict(zip(names, (0.5, *ERRORS), strict=True))
    second |= dict(zip(names, last, strict=True)) | {"epsilon_user": spent.get_epsilon(1e-3)}
    folder.replace_metrics([first, second])
    return folder


def record_of(folder: RunFolder) -> RunRecord:
    return read_runs([folder.path])[0]


def test_status_has_a_line_with_the_last_rating_and_both_errors(tmp_path: Path) -> None:
    folder = rated_run(tmp_path / "run")
    (line,) = (line for line in status_lines(folder) if line.startswith("rated"))
    assert line == "rated      after round 2 by clients: accuracy 0.7000 (standard error 0.0500; 0.0400 by noise alone)"
    numbers = [{"name": "accuracy", "value": 0.7, "error": 0.05, "by_noise": 0.04}]
    assert status_facts(folder)["rating"] == {"round": 2, "numbers": numbers}
    assert not any(line.startswith("model") for line in status_lines(folder))


def test_the_price_is_the_difference_to_the_same_rounds_without_ratings(tmp_path: Path) -> None:
    (said,) = ratings_cost(record_of(rated_run(tmp_path / "run")))
    with_ratings, without = (
        float(number) for number in re.findall(r"epsilon ([\d.]+) with 2 ratings, ([\d.]+)", said)[0]
    )
    plain = PLDAccountant().compose(PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0)), 2).get_epsilon(1e-3)
    assert without == pytest.approx(plain, rel=1e-3)
    assert with_ratings > 1.1 * without


def test_a_client_that_noises_its_own_answers_pays_for_them_alone(tmp_path: Path) -> None:
    off = ("privacy.user.enabled=false", "privacy.user.noise_multiplier=null", "privacy.user.target_epsilon=null")
    on = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=1", "data.num_clients=2")
    folder = make_run(tmp_path / "run", *WORDS, *off, *on)
    folder.replace_metrics([row | {"accuracy_error": 0.1, "epsilon_example": 5.0} for row in folder.read_metrics()])
    (said,) = ratings_cost(record_of(folder))
    alone = PLDAccountant().compose(GaussianDpEvent(3.0), 2).get_epsilon(1e-3)
    assert f"its answers to 2 ratings, if it gave them all, cost {alone:.4g} alone" in said
