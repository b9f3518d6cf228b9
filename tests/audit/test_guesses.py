"""Guesses at who was in, and the number that is planned."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from discreet.audit.canary_scores import CanaryScores
from discreet.audit.guesses import Guesses, guess, planned_number
from discreet.audit.one_run_bound import one_run_bound

SCORES = np.array([3.0, -2.0, 0.1, 5.0, -7.0])


@pytest.mark.parametrize(("made", "correct"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_the_ends_of_the_order_are_guessed(made: int, correct: int) -> None:
    # By hand: in order -7 (out), -2 (in), 0.1 (in), 3 (out), 5 (in).
    included = np.array([False, True, True, True, False])
    assert guess(CanaryScores(SCORES, included), made=made) == Guesses(5, made, correct)


def test_with_equal_scores_the_coins_decide_nothing() -> None:
    coins = np.random.default_rng(6).random(4000) < 0.5
    found = guess(CanaryScores(np.zeros(4000), coins), made=2000)
    assert abs(found.correct - 1000) < 4 * 22.4  # standard deviation of a fair coin


def test_the_plan_reads_no_score() -> None:
    assert [*inspect.signature(planned_number).parameters] == ["canaries", "shift", "bound"]


def test_the_plan_is_nearly_as_good_as_the_best_number() -> None:
    included = np.arange(4000) % 2 == 0
    scores = CanaryScores(np.random.default_rng(8).normal(size=4000) + included, included)

    def bound(guesses: Guesses) -> float:
        return one_run_bound(guesses, delta=1e-5)

    planned = bound(guess(scores, made=planned_number(4000, shift=1.0, bound=bound)))
    others = [bound(guess(scores, made=made)) for made in range(100, 4001, 150)]
    assert planned > 0.8 * max(others)
    assert planned > 2 * others[-1] > 0


@pytest.mark.parametrize("numbers", [(5, 6, 1), (5, 3, 4), (5, 0, 0), (5, 3, -1)])
def test_impossible_counts_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="correct <= made"):
        Guesses(*numbers)
