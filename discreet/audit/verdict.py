"""The verdict: what a ledger claims beside what an audit found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from discreet.audit.canary_scores import Experiment, Observation, Releases
from discreet.audit.gaussian_fit import GaussianFit, fit_gaussians
from discreet.audit.lower_bounds import fdp_bound, guess, one_run_bound, planned, repeated_bound
from discreet.audit.power import power_of

SIGNIFICANCE = 0.05  # of the bounds and the interval that are shown
FALSE_ALARM = 0.01  # of "refuted", over all observations and bounds of an experiment together
MOST_BOUNDS = 3  # of one observation
SHOWN = 10  # rounds that are printed

ONE_RUN, FDP, REPEATED, FIT = "one run", "f-DP", "any scores", "Gaussian fit"
ASSUMES = {
    ONE_RUN: "fair and independent coins",
    FDP: "fair and independent coins, and a mechanism as private as a Gaussian one with the claimed epsilon",
    REPEATED: "independent runs",
    FIT: "Gaussian scores",
}


@dataclass(frozen=True)
class Judgement:
    """The findings on one observation, as audit.json has them.

    Attributes:
      claimed, delta, adjacency: what the ledger states.
      estimate, interval: by the Gaussian fit, the interval at 95 %. None if the noise or the scores are not Gaussian,
        or if there are fewer than 20 scores of a kind; and for a single round whose claim stands: it is too rough to
        be set beside one, and of a sampled round no Gaussian.
      bounds: lower bounds of epsilon by method of `ASSUMES`, with the strongest assumption last: `epsilon` is at 95 %,
        and `strict` at the level of the verdict.
      refuted_by: the methods whose strict bound passes the claim.
    """

    name: str
    claimed: float
    delta: float
    adjacency: str
    estimate: float | None
    interval: tuple[float, float] | None
    bounds: dict[str, dict[str, float]]
    refuted_by: tuple[str, ...]

    @property
    def row(self) -> dict[str, object]:
        """A row of the table that is printed."""
        return {
            "": self.name,
            "claimed": self.claimed,
            "estimate": "-" if self.estimate is None else f"{self.estimate:.3g}",
            "interval": "-" if self.interval is None else "{:.3g} .. {:.3g}".format(*self.interval),
            **{f"bound: {method}": f"{bound['epsilon']:.3g}" for method, bound in self.bounds.items()},
            "refuted by": ", ".join(self.refuted_by) or "none",
        }


@dataclass(frozen=True)
class Verdict:
    """The findings of an audit; the last observation is of the whole run.

    Attributes:
      false_alarm: if every claim holds, and what the bounds assume, the probability of `refuted` is at most this.
      power: what the bounds of the whole run could have found, in words; `finds`: there is something.
    """

    mechanism: str
    observations: tuple[Judgement, ...]
    false_alarm: float
    power: str
    finds: bool

    @property
    def refuted(self) -> bool:
        """True if a lower bound passes a claim. If none does, that shows no privacy: another audit may find more."""
        return any(found.refuted_by for found in self.observations)

    @property
    def shown(self) -> list[Judgement]:
        """The judgements to print: the run, the first ten rounds, and all that are refuted."""
        *rounds, run = self.observations
        return [*(found for number, found in enumerate(rounds) if found.refuted_by or number < SHOWN), run]

    def lines(self) -> Iterator[str]:
        """The words below the table: what each bound assumes, and the verdict."""
        run = self.observations[-1]
        if left := len(self.observations) - len(self.shown):
            yield f"{left} more rounds are in audit.json"
        yield f"{self.mechanism}, {run.adjacency}, delta {run.delta:g}; interval and bounds at 95 %"
        yield from (f"bound: {method} assumes {ASSUMES[method]}" for method in run.bounds)
        rate = f"false-alarm rate {self.false_alarm:g}"
        if self.refuted:
            yield f"REFUTED ({rate}): {', '.join(found.name for found in self.observations if found.refuted_by)}"
        elif self.finds:
            yield f"not refuted: no bound passes its claim ({rate}); this is no proof"
        else:
            yield "no verdict: nothing was found, and nothing could have been; ask for more --canaries or --runs"


def judge(experiment: Experiment, *, false_alarm: float = FALSE_ALARM) -> Verdict:
    """Sets each claim beside the estimate and the lower bounds. `false_alarm` is within (0, `SIGNIFICANCE`]."""
    releases, count = experiment.releases, len(experiment.observations)
    levels = levels_of(count - 1, false_alarm=false_alarm)
    *rounds, run = (_judged(*each, releases) for each in zip(experiment.observations, levels, strict=True))
    told = (each if each.refuted_by else replace(each, estimate=None, interval=None) for each in rounds)
    scores = experiment.observations[-1].scores
    canaries = len(scores.seen if releases.repeated else scores.values)
    power = power_of(releases, canaries, level=levels[-1])
    return Verdict(experiment.mechanism, (*told, run), false_alarm, *power)


def outlook(releases: Releases, count: int, *, rounds: int = 0) -> str:
    """What an audit of so many rounds will be able to find, in words: at the usual false-alarm rate."""
    return power_of(releases, count, level=levels_of(rounds, false_alarm=FALSE_ALARM)[-1])[0]


def levels_of(rounds: int, *, false_alarm: float) -> list[float]:
    """The level of each bound of the observations of so many rounds, and of the run after them.

    The run has half of the false-alarm rate and the rounds share the other half, each evenly over its bounds
    (Bonferroni). If there is no round by itself, the run has all.

    >>> levels_of(0, false_alarm=0.03), levels_of(2, false_alarm=0.12)
    ([0.01], [0.01, 0.01, 0.02])
    """
    share = false_alarm / MOST_BOUNDS
    return [share] if rounds == 0 else [*[share / 2 / rounds] * rounds, share / 2]


def _judged(seen: Observation, level: float, releases: Releases) -> Judgement:
    fit, claim = None if releases.noise_multiplier is None else fit_gaussians(seen.scores), seen.claim
    bounds = {
        method: {"epsilon": bound(significance=SIGNIFICANCE), "strict": bound(significance=level)}
        for method, bound in _methods(seen, releases, fit)
    }
    estimate = fit.epsilon(delta=claim.delta) if fit else None
    interval = fit.interval(delta=claim.delta, level=1 - SIGNIFICANCE) if fit else None
    refuted = tuple(method for method, bound in bounds.items() if bound["strict"] > claim.epsilon)
    return Judgement(seen.name, claim.epsilon, claim.delta, claim.adjacency, estimate, interval, bounds, refuted)


def _methods(
    seen: Observation, releases: Releases, fit: GaussianFit | None
) -> Iterator[tuple[str, Callable[..., float]]]:
    claim, scores = seen.claim, seen.scores
    if releases.repeated:
        yield REPEATED, partial(repeated_bound, scores, delta=claim.delta)
    else:
        gaussian = releases.noise_multiplier is not None
        for method, bound in ((ONE_RUN, one_run_bound), (FDP, fdp_bound))[: 1 + gaussian]:
            made = planned(len(scores.values), claim.epsilon, claim.delta, shifts=method == FDP)
            yield method, partial(bound, guess(scores, made=made), delta=claim.delta)
    if fit is not None:
        yield FIT, partial(fit.lower_bound, delta=claim.delta)
