"""What an audit can find is said before it runs, and met by audits of made scores."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from discreet.audit.canary_scores import CanaryScores, Releases, RepeatedScores
from discreet.audit.gaussian_fit import fit_gaussians
from discreet.audit.gaussian_tradeoff import epsilon_of_shift, shift_of_epsilon
from discreet.audit.guesses import Guesses, guess
from discreet.audit.one_run_bound import one_run_bound
from discreet.audit.power import canaries_needed, planned, power_of, smallest_fault

DELTA, LEVEL = 1e-3, 0.01 / 3
ONE_ROUND = Releases(1, 1.0, 1.0, epsilon_of_shift(1.0, delta=DELTA), DELTA)


def scores(generator: np.random.Generator, releases: Releases, canaries: int, share: float) -> CanaryScores:
    """The inner products of canaries with the sum of so many sampled rounds."""
    included = generator.random(canaries) < 0.5
    often = generator.binomial(releases.rounds, releases.probability, canaries) * included
    noise = share * releases.noise_multiplier * math.sqrt(releases.rounds)
    return CanaryScores(often + noise * generator.normal(size=canaries), included, centred=True)


@pytest.mark.parametrize(("share", "shift"), [(1.0, 1.0), (0.5, 2.0)])
def test_without_sampling_the_shift_is_that_of_the_noise_that_is_left(share: float, shift: float) -> None:
    assert ONE_ROUND.shift(share) == pytest.approx(shift)


def test_with_sampling_the_shift_is_that_of_drawn_scores() -> None:
    releases = Releases(20, 0.3, 1.5, 3.0, DELTA)
    drawn = fit_gaussians(scores(np.random.default_rng(61), releases, 200_000, 0.5))
    assert releases.shift(0.5) == pytest.approx(drawn.shift, rel=0.01)  # a standard error of 0.4 %


@pytest.mark.parametrize("canaries", [100, 1000])
def test_nine_of_ten_audits_find_the_smallest_fault(canaries: int) -> None:
    share = smallest_fault(ONE_ROUND, canaries, level=LEVEL)
    assert share is not None
    generator, claimed = np.random.default_rng(67), shift_of_epsilon(ONE_ROUND.epsilon, delta=DELTA)
    found = sum(
        fit_gaussians(scores(generator, ONE_ROUND, canaries, share)).lower_bound(delta=DELTA, significance=LEVEL)
        > epsilon_of_shift(claimed, delta=DELTA)
        for _ in range(200)
    )
    assert 165 <= found <= 195  # of 180, with a standard deviation of 4; the seed is fixed


def test_nine_of_ten_audits_of_one_release_that_is_repeated_find_the_smallest_fault() -> None:
    releases = replace(ONE_ROUND, repeated=True)
    share = smallest_fault(releases, 1000, level=LEVEL)
    assert share is not None
    generator, found = np.random.default_rng(71), 0
    for _ in range(200):
        drawn = RepeatedScores(1 + share * generator.normal(size=500), share * generator.normal(size=500))
        found += fit_gaussians(drawn).lower_bound(delta=DELTA, significance=LEVEL) > ONE_ROUND.epsilon
    assert 165 <= found <= 195  # of 180, with a standard deviation of 4; the seed is fixed


def test_of_releases_it_is_said_how_many_are_needed_each_way() -> None:
    said = power_of(replace(ONE_ROUND, repeated=True), 500, level=LEVEL).says
    found, needed = map(int, re.findall(r"\d+(?=%)|\d+(?= are needed)", said))
    assert "500 releases with the canary and as many without" in said
    assert found == round(100 * (smallest_fault(replace(ONE_ROUND, repeated=True), 1000, level=LEVEL) or 0))
    assert 2 * needed == pytest.approx(
        canaries_needed(replace(ONE_ROUND, repeated=True), share=0.5, level=LEVEL), abs=1
    )


def test_so_many_canaries_as_are_needed_find_just_that_fault() -> None:
    needed = canaries_needed(ONE_ROUND, share=0.7, level=LEVEL)
    assert needed is not None
    assert smallest_fault(ONE_ROUND, needed, level=LEVEL) == pytest.approx(0.7, abs=0.005)


def test_what_no_number_of_canaries_finds_has_none() -> None:
    # Claimed of a small cohort's single round: scores that are hardly Gaussian show far less than the claim.
    rare = Releases(1, 0.01, 0.5, 8.0, DELTA)
    assert canaries_needed(rare, share=0.9, level=LEVEL) is None
    assert smallest_fault(rare, 100, level=LEVEL) is None


RARE = Releases(1, 0.01, 0.5, 8.0, DELTA)


@pytest.mark.parametrize(
    ("releases", "canaries", "said"),
    [
        (ONE_ROUND, 40, "they are too few for the Gaussian fit, which needs 60"),
        (ONE_ROUND, 200, "they refute the claim if noise has 68% of its size or less"),
        (RARE, 100, "it could have found nothing: even without any noise 100 canaries show epsilon 0 on average"),
        (replace(ONE_ROUND, repeated=True), 30, "30 releases with the canary and as many without"),
        (replace(ONE_ROUND, epsilon=math.inf), 1000, "it could have found nothing: there is no claim"),
    ],
)
def test_it_is_said_in_words(releases: Releases, canaries: int, said: str) -> None:
    found = power_of(releases, canaries, level=LEVEL)
    assert said in found.says
    assert found.finds is not found.says.startswith("it could have found nothing")


def test_without_noise_and_sampling_every_guess_is_right() -> None:
    laplace = replace(ONE_ROUND, gaussian=False)
    made = planned(200, laplace.epsilon, DELTA, shifts=False)
    most = one_run_bound(Guesses(200, made, made), delta=DELTA, significance=LEVEL)
    assert f"show epsilon {most:.3g} on average" in power_of(laplace, 200, level=LEVEL).says


@pytest.mark.parametrize("rounds", [1, 20])
def test_without_noise_guesses_at_sampled_canaries_show_what_is_said(rounds: int) -> None:
    sampled = Releases(rounds, 0.1, 1.0, 0.4, DELTA, gaussian=False)
    said = re.search(r"show epsilon (\S+) on average", power_of(sampled, 2000, level=LEVEL).says)
    assert said is not None
    made, drawn = planned(2000, 0.4, DELTA, shifts=False), np.random.default_rng(73)
    shown = [
        one_run_bound(guess(scores(drawn, sampled, 2000, 1e-9), made=made), delta=DELTA, significance=LEVEL)
        for _ in range(20)
    ]
    assert float(said[1]) == pytest.approx(np.mean(shown), abs=0.06)
