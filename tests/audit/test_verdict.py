"""The verdict and the estimates under it: claims that hold are left alone, and claims that do not are refuted."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import binomtest, norm

from discreet.audit.canary_scores import Claim, Experiment, Observation, Releases, Scores
from discreet.audit.gaussian_fit import (
    GaussianFit,
    Normal,
    delta_of_normals,
    epsilon_of_normals,
    epsilon_of_shift,
    fit_gaussians,
    shift_of_epsilon,
)
from discreet.audit.lower_bounds import (
    Guesses,
    fdp_bound,
    fdp_shift_bound,
    guess,
    one_run_bound,
    one_run_p_value,
    planned,
    repeated_bound,
)
from discreet.audit.power import power_of, smallest_fault
from discreet.audit.verdict import FIT, ONE_RUN, REPEATED, Verdict, judge
from tests.audit.made import gaussian_scores, randomised_responses, repeated_gaussians, repeated_scores

CLAIM = Claim(epsilon_of_shift(1.0, delta=1e-3), 1e-3, "add or remove one client")
RELEASES = Releases(1, 1.0, 1.0, CLAIM)
REPEATED_ONCE = replace(RELEASES, repeated=True)


def verdict_on(scores: Scores, releases: Releases = RELEASES) -> Verdict:
    return judge(Experiment("test", (Observation("run", releases.claim, scores),), {}, releases))


def test_a_true_claim_is_refuted_in_at_most_1_percent_of_audits() -> None:
    generator = np.random.default_rng(400)
    refuted = [verdict_on(gaussian_scores(generator, canaries=300, noise=1.0)).refuted for _ in range(60)]
    assert sum(refuted) <= 1


def test_noise_at_half_its_size_is_refuted() -> None:
    verdict = verdict_on(gaussian_scores(np.random.default_rng(401), canaries=300, noise=0.5))
    assert verdict.observations[0].refuted_by == (FIT,)


def test_with_enough_runs_the_bound_that_assumes_nothing_of_scores_refutes_too() -> None:
    verdict = verdict_on(repeated_gaussians(np.random.default_rng(402), runs=30_000, noise=0.5), REPEATED_ONCE)
    assert verdict.observations[0].refuted_by == (REPEATED, FIT)


def test_laplace_noise_is_not_refuted_by_a_gaussian_fit_to_it() -> None:
    # Scale 1 is (1, 0)-DP, and a Gaussian with this mean and spread would have 2.9.
    generator = np.random.default_rng(405)
    included = generator.random(2000) < 0.5
    scores, claim = Scores(generator.laplace(size=2000) + included, included), Claim(1.0, 1e-5, "replace")
    for noise in (1.0, None):
        verdict = verdict_on(scores, Releases(1, 1.0, noise, claim))
        assert not verdict.refuted
        assert verdict.observations[0].estimate is None
    assert [*verdict.observations[0].bounds] == [ONE_RUN]


@pytest.mark.parametrize("noise", [1.0, 0.5], ids=["stands", "refuted"])
def test_a_single_round_is_estimated_only_if_its_claim_is_refuted(noise: float) -> None:
    scores = gaussian_scores(np.random.default_rng(415), canaries=600, noise=noise)
    seen = tuple(Observation(name, CLAIM, scores) for name in ("round 1", "run"))
    first, run = judge(Experiment("test", seen, {}, RELEASES)).observations
    assert (first.estimate, first.interval) == ((None, None) if noise == 1.0 else (run.estimate, run.interval))
    assert run.estimate is not None
    assert bool(first.refuted_by) is (noise == 0.5)


DELTA, LEVEL = 1e-3, 0.01 / 3
ONE_ROUND = Releases(1, 1.0, 1.0, Claim(epsilon_of_shift(1.0, delta=DELTA), DELTA, ""))
OFTEN = replace(ONE_ROUND, repeated=True)


def drawn(generator: np.random.Generator, releases: Releases, canaries: int, share: float) -> Scores:
    """The inner products of canaries with the sum of so many sampled rounds."""
    included = generator.random(canaries) < 0.5
    often = generator.binomial(releases.rounds, releases.probability, canaries) * included
    noise = share * (releases.noise_multiplier or 1.0) * math.sqrt(releases.rounds)
    return Scores(often + noise * generator.normal(size=canaries), included, centred=True)


def test_with_sampling_the_shift_is_that_of_drawn_scores() -> None:
    releases = Releases(20, 0.3, 1.5, ONE_ROUND.claim)
    found = drawn(np.random.default_rng(61), releases, 200_000, 0.5)
    pooled = math.sqrt((found.seen.var() + found.unseen.var()) / 2)
    assert releases.shift(0.5) == pytest.approx(found.seen.mean() / pooled, rel=0.01)  # a standard error of 0.4 %


@pytest.mark.parametrize(("releases", "count"), [(ONE_ROUND, 100), (ONE_ROUND, 1000), (OFTEN, 1000)])
def test_nine_of_ten_audits_find_the_smallest_fault(releases: Releases, count: int) -> None:
    share, generator, found = smallest_fault(releases, count, level=LEVEL), np.random.default_rng(67), 0
    for _ in range(200):
        once = repeated_gaussians(generator, runs=count // 2, noise=share)
        fit = fit_gaussians(once if releases.repeated else drawn(generator, releases, count, share))
        found += fit is not None and fit.lower_bound(delta=DELTA, significance=LEVEL) > releases.claim.epsilon
    assert 165 <= found <= 195  # of 180, with a standard deviation of 4; the seed is fixed


@pytest.mark.parametrize("rounds", [1, 20])
def test_without_noise_guesses_at_sampled_canaries_show_what_is_said(rounds: int) -> None:
    sampled = Releases(rounds, 0.1, None, Claim(0.4, DELTA, ""))
    said = re.search(r"show epsilon (\S+) on average", power_of(sampled, 2000, level=LEVEL)[0])
    made, generator = planned(2000, 0.4, DELTA, shifts=False), np.random.default_rng(73)
    shown = [
        one_run_bound(guess(drawn(generator, sampled, 2000, 1e-9), made=made), delta=DELTA, significance=LEVEL)
        for _ in range(20)
    ]
    assert float(said[1]) == pytest.approx(np.mean(shown), abs=0.06)


# google-deepmind/jax_privacy: auditing._epsilon_one_run and _epsilon_one_run_fdp at significance 0.05.
PEER = [
    ((1000, 100, 90, 1e-5), 1.6261437, 2.4564051),
    ((2000, 400, 280, 1e-5), 0.6621238, 1.0154924),
    ((2000, 1, 1, 1e-5), 0.0, 0.0),
    ((2000, 2000, 1200, 1e-3), 0.2915597, 0.3753095),
    ((2000, 300, 299, 1e-5), 4.1052919, 6.7139235),
    ((100, 100, 100, 1e-3), 3.2023037, 6.1486320),
    ((5000, 900, 700, 1e-6), 1.1186309, 1.8563027),
]


@pytest.mark.parametrize(("given", "one_run", "fdp"), PEER)
def test_the_bounds_are_those_of_jax_privacy(given: tuple[int, int, int, float], one_run: float, fdp: float) -> None:
    *counts, delta = given
    assert one_run_bound(Guesses(*counts), delta=delta) == pytest.approx(one_run, abs=2e-6)
    assert fdp_bound(Guesses(*counts), delta=delta) == pytest.approx(fdp, abs=2e-6)


def test_for_randomised_response_it_passes_the_truth_as_often_as_it_may() -> None:
    generator, passed = np.random.default_rng(118), 0
    for _ in range(400):
        scores = randomised_responses(generator, canaries=500, epsilon=1.0)
        passed += one_run_p_value(guess(scores, made=500), epsilon=1.0, delta=1e-12) < 0.05
    # 5 % of 400 is 20; counts are whole, so that a little less is used. A bound that gives room away passes never.
    assert 6 <= passed <= 24


@pytest.mark.parametrize(("shift", "made"), [(0.48, 245), (1.0, 207)])
def test_for_gaussian_noise_the_fdp_bound_passes_the_truth_in_at_most_5_percent_of_runs(
    shift: float, made: int
) -> None:
    generator = np.random.default_rng(1620)
    bounds = [
        fdp_shift_bound(guess(gaussian_scores(generator, canaries=2000, noise=1 / shift), made=made))
        for _ in range(200)
    ]
    # 5 % of 200 is 10, with a standard deviation of 3; the seed is fixed.
    assert sum(bound > shift for bound in bounds) <= 10
    assert np.mean(bounds) > 0.5 * shift


@pytest.mark.parametrize(("made", "correct"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_the_ends_of_the_order_are_guessed(made: int, correct: int) -> None:
    # By hand: in order -7 (out), -2 (in), 0.1 (in), 3 (out), 5 (in).
    scores = Scores(np.array([3.0, -2.0, 0.1, 5.0, -7.0]), np.array([False, True, True, True, False]))
    assert guess(scores, made=made) == Guesses(5, made, correct)


def test_the_rates_of_repeated_scores_have_clopper_pearson_limits() -> None:
    # Two values only, so that the threshold is known: 10 of 100 are told wrongly among the in, 5 of 100 among the out.
    seen = np.concatenate([np.ones(180), np.zeros(20)])
    unseen = np.concatenate([np.ones(10), np.zeros(190)])
    missed, false = (binomtest(count, 100).proportion_ci(0.95, method="exact").high for count in (10, 5))
    expected = max(math.log((1 - 1e-3 - missed) / false), math.log((1 - 1e-3 - false) / missed))
    assert repeated_bound(repeated_scores(seen, unseen), delta=1e-3) == pytest.approx(expected)


def test_of_repeated_scores_it_passes_the_truth_in_at_most_5_percent_of_audits() -> None:
    # A mechanism that tells the coin truly with probability 3/4, so (log 3, 0)-DP: a threshold is its best attack.
    generator, passed = np.random.default_rng(56), 0
    for _ in range(400):
        seen, unseen = (generator.random(400) < share for share in (0.75, 0.25))
        scores = repeated_scores(seen.astype(float), unseen.astype(float))
        passed += repeated_bound(scores, delta=1e-9) > math.log(3)
    assert passed <= 20


def test_the_way_in_which_only_a_low_score_tells_is_found_too() -> None:
    # Without the canary a run is known for sure in half of the cases; with it, almost never.
    unseen = np.concatenate([np.zeros(1000), np.ones(1000)])[np.arange(2000) * 7 % 2000]
    assert repeated_bound(repeated_scores(np.ones(2000), unseen), delta=1e-5) > 4


SMALL_DELTA = 1e-5
PAIRS = [
    (Normal(1.0, 1.3), Normal(0.0, 1.0)),
    (Normal(1.0, 0.7), Normal(0.0, 1.0)),
    (Normal(0.0, 2.0), Normal(0.0, 1.0)),
    (Normal(-3.0, 0.2), Normal(-3.1, 0.21)),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("epsilon", [0.0, 3.0])
def test_delta_is_the_integral_of_what_passes_e_to_the_epsilon(one: Normal, other: Normal, epsilon: float) -> None:
    wide = 12 * max(one.spread, other.spread)
    at, step = np.linspace(one.mean - wide, one.mean + wide, 400_001, retstep=True)
    excess = norm.pdf(at, one.mean, one.spread) - math.exp(epsilon) * norm.pdf(at, other.mean, other.spread)
    integral = float(np.maximum(excess, 0).sum() * step)
    assert delta_of_normals(one, other, epsilon) == pytest.approx(integral, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("shift", "delta"), [(0.1, 1e-5), (1.0, 1e-2), (4.0, 1e-9)])
def test_with_spreads_that_hardly_differ_it_is_the_gaussian_mechanism(shift: float, delta: float) -> None:
    found = epsilon_of_normals(Normal(7 * shift, 7.0), Normal(0.0, 7.0 * (1 + 1e-9)), delta=delta)
    assert found == pytest.approx(get_epsilon_gaussian(1 / shift, delta), rel=1e-5, abs=1e-7)
    assert shift_of_epsilon(epsilon_of_shift(shift, delta=delta), delta=delta) == pytest.approx(shift, rel=1e-6)


@pytest.mark.parametrize("noise", [0.5, 2.085])
def test_the_interval_holds_the_true_epsilon_in_95_percent_of_runs(noise: float) -> None:
    generator, truth = np.random.default_rng(2903), epsilon_of_shift(1 / noise, delta=SMALL_DELTA)
    fits = [fit_gaussians(gaussian_scores(generator, canaries=500, noise=noise)) for _ in range(200)]
    intervals = [fit.interval(delta=SMALL_DELTA) for fit in fits if fit is not None and fit.one_spread]
    held = sum(low <= truth <= high for low, high in intervals)
    # 95 % of 200, with a standard deviation of 3.1; the seed is fixed.
    assert len(intervals) >= 197
    assert abs(held - 0.95 * len(intervals)) < 9


def fitted(scores: Scores) -> GaussianFit:
    return fit_gaussians(scores)


@pytest.mark.parametrize("centred", [True, False])
def test_two_spreads_are_told_apart_and_judged_exactly(centred: bool) -> None:
    generator, included = np.random.default_rng(1201), np.arange(1200) % 2 == 0
    truth = epsilon_of_normals(Normal(1.0, 1.5), Normal(0.0, 1.0), delta=SMALL_DELTA)
    intervals = []
    for _ in range(60):
        scores = np.where(included, generator.normal(1.0, 1.5, size=1200), generator.normal(size=1200))
        fit = fitted(Scores(scores, included, centred))
        assert not fit.one_spread
        intervals.append(fit.interval(delta=SMALL_DELTA))
    assert sum(low <= truth <= high for low, high in intervals) >= 51


def test_a_mechanism_that_hides_the_mean_but_not_the_spread_is_found() -> None:
    generator = np.random.default_rng(9)
    scores = repeated_scores(generator.normal(scale=2.0, size=2000), generator.normal(size=2000))
    assert fitted(scores).lower_bound(delta=SMALL_DELTA) > 5


@pytest.mark.parametrize("kind", ["laplace", "two values"])
def test_scores_that_are_not_gaussian_are_not_fitted(kind: str) -> None:
    generator = np.random.default_rng(40)
    noise = generator.laplace(size=2000) if kind == "laplace" else generator.choice([-1.0, 1.0], size=2000)
    included = generator.random(2000) < 0.5
    assert fit_gaussians(Scores(noise + included, included)) is None
    assert fit_gaussians(Scores(generator.normal(size=2000) + included, included)) is not None
