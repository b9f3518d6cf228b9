"""The verdict: what a ledger claims beside what an audit found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from discreet.audit.canary_scores import CanaryScores, Experiment, Observation, Releases, RepeatedScores
from discreet.audit.fdp_bound import fdp_bound
from discreet.audit.gaussian_fit import GaussianFit, can_fit, fit_gaussians
from discreet.audit.guesses import guess
from discreet.audit.one_run_bound import one_run_bound
from discreet.audit.power import Power, planned, power_of
from discreet.audit.repeated_bound import repeated_bound

SIGNIFICANCE = 0.05  # of the bounds and the interval that are shown
FALSE_ALARM = 0.01  # of "refuted", over all observations and bounds of an experiment together
MOST_BOUNDS = 3  # of one observation

ONE_RUN, FDP, REPEATED, FIT = "one run", "f-DP", "any scores", "Gaussian fit"
ASSUMES = {
    ONE_RUN: "fair and independent coins",
    FDP: "fair and independent coins, and a mechanism as private as a Gaussian one with the claimed epsilon",
    REPEATED: "independent runs",
    FIT: "Gaussian scores",
}


@dataclass(frozen=True)
class LowerBound:
    """A lower bound of epsilon by one method.

    Attributes:
      method: ONE_RUN, FDP, REPEATED or FIT; `ASSUMES` says what each assumes.
      epsilon: at 95 %.
      strict: at the level of the verdict, at most `epsilon`.
    """

    method: str
    epsilon: float
    strict: float


@dataclass(frozen=True)
class Judgement:
    """What was found of one observation.

    Attributes:
      name, claimed, delta, adjacency: of the observation.
      estimate, interval: of the Gaussian fit, at 95 %; None if the noise or the scores are not Gaussian,
        or if there are fewer than 20 scores of a kind. None too of a single round whose claim stands: it is too rough
        to be set beside one, and of a sampled round no Gaussian.
      bounds: lower bounds, strongest assumption last.
    """

    name: str
    claimed: float
    delta: float
    adjacency: str
    estimate: float | None
    interval: tuple[float, float] | None
    bounds: tuple[LowerBound, ...]

    @property
    def refuted_by(self) -> tuple[str, ...]:
        """The methods whose bound passes the claim at the level of the verdict."""
        return tuple(bound.method for bound in self.bounds if bound.strict > self.claimed)


@dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes:
      mechanism: what was audited.
      judgements: one for each observation; the last is of the whole run.
      false_alarm: if every claim holds, and what the bounds assume, the probability of `refuted` is at most this.
      power: what could have been found of the whole run.
    """

    mechanism: str
    judgements: tuple[Judgement, ...]
    false_alarm: float
    power: Power

    @property
    def refuted(self) -> bool:
        """Whether a lower bound passes a claim. If none does, that shows no privacy: another audit may find more."""
        return any(judgement.refuted_by for judgement in self.judgements)


def judge(experiment: Experiment, *, false_alarm: float = FALSE_ALARM) -> Verdict:
    """Sets each claim beside the estimate and the lower bounds.

    The last observation, that of the run, has half of the false-alarm rate and the others share the other half, each
    evenly over its bounds (Bonferroni). If there is only one, it has all.

    Raises:
      ValueError: `false_alarm` outside (0, SIGNIFICANCE].
    """
    if not 0 < false_alarm <= SIGNIFICANCE:
        raise ValueError(f"false_alarm must be within (0, {SIGNIFICANCE}] (got {false_alarm})")
    *rounds, run = experiment.observations
    gaussian, levels = experiment.releases.gaussian, levels_of(len(rounds), false_alarm=false_alarm)
    *judged, last = [
        _judged(seen, gaussian=gaussian, level=level) for seen, level in zip([*rounds, run], levels, strict=True)
    ]
    told = [each if each.refuted_by else replace(each, estimate=None, interval=None) for each in judged]
    count = len(run.scores.seen if isinstance(run.scores, RepeatedScores) else run.scores.scores)
    power = power_of(experiment.releases, count, level=levels[-1])
    return Verdict(experiment.mechanism, (*told, last), false_alarm, power)


def outlook(releases: Releases, count: int, *, rounds: int = 0) -> str:
    """What an audit of so many rounds can find, see `power_of`, before it runs: at the usual false-alarm rate."""
    return power_of(releases, count, level=levels_of(rounds, false_alarm=FALSE_ALARM)[-1]).says


def levels_of(rounds: int, *, false_alarm: float) -> list[float]:
    """The level of each bound of the observations of so many rounds, and of the run after them, see `judge`.

    >>> levels_of(0, false_alarm=0.03), levels_of(2, false_alarm=0.12)
    ([0.01], [0.01, 0.01, 0.02])
    """
    share = false_alarm / MOST_BOUNDS
    return [share] if rounds == 0 else [*[share / 2 / rounds] * rounds, share / 2]


def _judged(seen: Observation, *, gaussian: bool, level: float) -> Judgement:
    claim, fit = seen.claim, fit_gaussians(seen.scores) if gaussian and can_fit(seen.scores) else None
    if fit is not None and not fit.gaussian:
        fit = None
    bounds = tuple(
        LowerBound(method, bound(significance=SIGNIFICANCE), bound(significance=level))
        for method, bound in _methods(seen, fit, gaussian=gaussian)
    )
    return Judgement(
        *(seen.name, claim.epsilon, claim.delta, claim.adjacency),
        estimate=fit.epsilon(delta=claim.delta) if fit else None,
        interval=fit.interval(delta=claim.delta, level=1 - SIGNIFICANCE) if fit else None,
        bounds=bounds,
    )


def _methods(
    seen: Observation, fit: GaussianFit | None, *, gaussian: bool
) -> Iterator[tuple[str, Callable[..., float]]]:
    delta = seen.claim.delta
    if isinstance(seen.scores, RepeatedScores):
        yield REPEATED, partial(repeated_bound, seen.scores, delta=delta)
    else:
        yield ONE_RUN, partial(_from_guesses, seen, ONE_RUN)
        if gaussian:
            yield FDP, partial(_from_guesses, seen, FDP)
    if fit is not None:
        yield FIT, partial(fit.lower_bound, delta=delta)


def _from_guesses(seen: Observation, method: str, *, significance: float) -> float:
    assert isinstance(seen.scores, CanaryScores)
    claim = seen.claim
    made = planned(len(seen.scores.scores), claim.epsilon, claim.delta, shifts=method == FDP)
    bound = one_run_bound if method == ONE_RUN else fdp_bound
    return bound(guess(seen.scores, made=made), delta=claim.delta, significance=significance)
