"""What an audit hands to its statistics."""

from __future__ import annotations

import numpy as np
import pytest

from discreet.audit.canary_scores import CanaryScores, Claim, Experiment, Releases, RepeatedScores

SCORES = np.array([0.5, -1.0, 2.0])


def test_scores_are_parted_by_the_coins() -> None:
    scores = CanaryScores(SCORES, np.array([True, False, True]))
    assert (scores.seen.tolist(), scores.unseen.tolist()) == ([0.5, 2.0], [-1.0])


@pytest.mark.parametrize("bad", [np.array([1.0, np.nan]), np.array([[1.0, 2.0]]), np.array([1, 2])], ids=str)
def test_scores_that_are_no_finite_vector_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="vector of finite float64"):
        CanaryScores(bad, np.ones(2, bool))
    with pytest.raises(ValueError, match="vector of finite float64"):
        RepeatedScores(np.zeros(2), bad)


def test_coins_that_do_not_fit_the_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="included must be"):
        CanaryScores(SCORES, np.ones(2, bool))
    with pytest.raises(ValueError, match="included must be"):
        CanaryScores(SCORES, np.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, 1e-5), (float("nan"), 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_a_claim_outside_its_range_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Claim(epsilon, delta, "add or remove one client")


def test_an_experiment_has_at_least_one_observation() -> None:
    with pytest.raises(ValueError, match="observations"):
        Experiment("user level", (), {}, Releases(1, 1.0, 1.0, 1.0, 1e-5))
