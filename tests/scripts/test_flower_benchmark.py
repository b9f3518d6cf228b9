"""The benchmark of Flower's simulation: the same rounds each way. What it measures decides nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import flower_speed as flower

WORDS = [*flower.WORK, "data.name=digits", "data.num_clients=40", "model.name=logistic_regression"]


@pytest.mark.parametrize("way", ["one by one", "batched"])
def test_each_way_gives_seconds_and_cohort_of_each_round(way: str) -> None:
    measured = flower.WAYS[way](WORDS, 3)
    assert len(measured) == 3
    assert all(seconds > 0 and 0 <= cohort <= 40 for seconds, cohort in measured)


@pytest.mark.slow
def test_under_ray_every_client_of_a_cohort_replies() -> None:
    assert len(flower.call_alone(flower.WAYS["flower"], WORDS, 2)) == 2


def took(seconds: float) -> flower.Rounds:
    def rounds(words: Sequence[str], count: int) -> list[tuple[float, int]]:
        return [(seconds, 100)] * count

    return rounds


def test_ratios_are_of_clients_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"flower": 2.0, "empty": 1.0, "one by one": 0.5, "batched": 0.02}
    monkeypatch.setattr(flower, "WAYS", {name: took(each) for name, each in seconds.items()})
    monkeypatch.setattr(flower, "call_alone", lambda way, words, count: way(words, count))
    row = flower.compared(WORDS, 3)
    assert (row["flower"], row["batched"], row["batched / flower"]) == (50, 5000, 100)
    assert row["of an empty one"] == 2


def test_mnist_is_measured_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flower.DATA_VARIABLE, str(tmp_path))
    assert flower.data_sets() == [("data.name=digits",)]
    (tmp_path / "mnist").mkdir()
    assert flower.data_sets()[1] == ("data.name=mnist", f"data.path={tmp_path / 'mnist'}")
