"""The page of all experiments says what the result files say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.experiments_page import PAGE, command, config_of, experiments, measured, page, results_of

ROOT = Path(__file__).resolve().parent.parent


def cells(name: str) -> list[str]:
    """The cells of an experiment's row on the page as it is committed."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    wanted = name if name == "default" else f"experiment={name}"
    (found,) = (row for row in rows if wanted in (row[0].strip("`").split()[1:] or ["default"]))
    return found


def test_the_page_is_what_the_result_files_make() -> None:
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_has_a_row_with_its_command(path: Path) -> None:
    assert f"experiment={path.stem}" in cells(path.stem)[0].strip("`").split()


def test_a_mean_of_three_runs_is_what_the_published_page_says() -> None:
    # docs/results.md was written by hand from the same runs.
    assert cells("mnist_users_scattering")[4:7] == ["2", "1e-05", "97.6 %"]
    assert cells("mnist_one_silo")[4:7] == ["2.37", "1e-05", "98.0 %"]


def test_an_experiment_that_was_never_measured_says_so() -> None:
    assert set(vars(measured("silos", results_of("no_such_experiment"))).values()) == {"-"}
    assert "never measured" in page()


def test_what_a_row_protects_is_what_its_settings_switch_on() -> None:
    for name in experiments():
        privacy = config_of(name).privacy
        on = {"user": privacy.user.enabled, "example": privacy.example.enabled, "local": privacy.local.kind != "none"}
        assert set(re.findall(r"\((\w+)\)", cells(name)[3])) == {kind for kind, enabled in on.items() if enabled}


def test_mnist_needs_its_folder_and_the_default_needs_nothing() -> None:
    assert command("default", config_of("default")) == "scripts/run"
    assert command("mnist_tff", config_of("mnist_tff")).endswith("data.path=FOLDER")
