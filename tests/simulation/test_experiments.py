"""The experiments reach what they promise, within their budgets. The seed was chosen before the bounds were tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate


def last_row(folder: Path, *words: str) -> dict[str, float]:
    simulate(load_config([*words, "seed=48017", f"output_dir={folder / 'run'}"]))
    return {name: value for name, value in RunFolder(folder / "run").read_metrics()[-1].items() if value is not None}


@pytest.mark.slow
def test_silos_learn_digits_with_example_level_privacy(tmp_path: Path) -> None:
    row = last_row(tmp_path, "experiment=silos")
    assert row["accuracy"] >= 0.85
    assert row["epsilon_example"] <= 6
    assert row["epsilon_user"] == float("inf")


def test_twenty_organisations_learn_digits_without_a_trusted_server(tmp_path: Path) -> None:
    row = last_row(tmp_path, "experiment=organisations")
    assert row["accuracy"] >= 0.85
    assert row["epsilon_user"] <= 8


@pytest.mark.slow
def test_a_fixed_clip_norm_learns_digits_too(tmp_path: Path) -> None:
    row = last_row(tmp_path, "experiment=fixed_clipping")
    assert row["accuracy"] >= 0.88
    assert row["epsilon_user"] <= 8
    assert row["clip_norm"] == pytest.approx(0.3)


@pytest.mark.slow
def test_both_guarantees_hold_at_once(tmp_path: Path) -> None:
    row = last_row(tmp_path, "experiment=both")
    assert row["accuracy"] >= 0.80
    assert row["epsilon_user"] <= 8
    assert row["epsilon_example"] <= 7  # a client that is drawn in 19 of the 30 rounds; in all of them it would be 9.4


@pytest.mark.slow
def test_six_thousand_users_of_mnist_at_user_level_2(tmp_path: Path, shared_data: Path) -> None:
    row = last_row(tmp_path, "experiment=mnist_users", f"data.path={shared_data / 'mnist'}")
    assert row["accuracy"] >= 0.905
    assert row["epsilon_user"] <= 2
