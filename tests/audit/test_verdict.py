"""The verdict: claims that hold are left alone, and claims that do not are refuted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from discreet.audit.canary_scores import Claim, Experiment, Observation, Releases, Scores
from discreet.audit.gaussian_fit import epsilon_of_shift
from discreet.audit.verdict import FIT, ONE_RUN, REPEATED, Verdict, judge
from tests.audit.made import gaussian_scores, repeated_gaussians

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
