"""The verdict: the claim of a ledger, the findings of an audit, and its power, in words and in
files."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from discreet import __version__
from discreet.audit.canaries import Experiment, Observation, Releases, Scores
from discreet.audit.estimates import (
    FEWEST,
    GaussianFit,
    Guesses,
    fdp_bound,
    fit_gaussians,
    guess_membership,
    one_run_bound,
    planned_guesses,
    repeated_bound,
    shift_of_epsilon,
)
from discreet.reporting.svg_style import INK, SERIES, Picture, picture
from discreet.run_files.whole_files import replace_file, write_json

SIGNIFICANCE = 0.05  # of the bounds and the interval that are shown
FALSE_ALARM = 0.01  # of "refuted", over all observations and bounds of an experiment together
MOST_BOUNDS = 3  # of one observation
SHOWN = 10  # rounds that are printed
POWER = 0.9  # the share of audits that find a fault of the stated size
ENOUGH = 3 * FEWEST  # scores: with fewer, the coins often leave less than `FEWEST` of a kind
MOST_CANARIES = 10**7
HALF = 0.5
LEAST_SHARE = 1e-3  # of the noise: a smaller share counts as none
RECORD = "audit.json"
PICTURE = "audit.svg"
BINS = 40
_NOTE = (
    "Filled: how often a score was seen, in the whole run. Lines: the Gaussians that were fitted "
    "to the scores."
)

ONE_RUN = "one run"
FDP = "f-DP"
REPEATED = "any scores"
FIT = "Gaussian fit"
ASSUMES = {
    ONE_RUN: "fair and independent coins",
    FDP: "fair and independent coins, and a mechanism as private as a Gaussian one with the "
    "claimed epsilon",
    REPEATED: "independent runs",
    FIT: "Gaussian scores; with two spreads it is the lower end of the two-sided interval",
}


@dataclass(frozen=True)
class Judgement:
    """The findings on one observation, as written to audit.json.

    Attributes:
      claimed, delta, adjacency: the claim of the ledger.
      estimate, interval: by the Gaussian fit, the interval at 95 %. None if the noise or the scores
        are not Gaussian, or if there are fewer than 60 scores, or 20 of a kind. Also None for a
        single round whose claim stands: the estimate is too rough to compare, and the scores of a
        sampled round are not Gaussian.
      bounds: lower bounds of epsilon by method of `ASSUMES`, with the strongest assumption last:
        `epsilon` is at 95 %, and `strict` at the level of the verdict.
      refuted_by: the methods whose strict bound exceeds the claim.
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
        """A row of the printed table."""
        return {
            "": self.name,
            "claimed": self.claimed,
            "estimate": "-" if self.estimate is None else f"{self.estimate:.3g}",
            "interval": "-" if self.interval is None else "{:.3g} .. {:.3g}".format(*self.interval),
            **{
                f"bound: {method}": f"{bound['epsilon']:.3g}"
                for method, bound in self.bounds.items()
            },
            "refuted by": ", ".join(self.refuted_by) or "none",
        }


@dataclass(frozen=True)
class Verdict:
    """The findings of an audit; the last observation is of the whole run.

    Attributes:
      false_alarm: bound on the probability of `refuted` if every claim, and the assumptions of the
        bounds, hold.
      power: the faults that the bounds of the whole run could have found, in words; `finds`: True
        if there are any.
    """

    mechanism: str
    observations: tuple[Judgement, ...]
    false_alarm: float
    power: str
    finds: bool

    @property
    def refuted(self) -> bool:
        """True if a lower bound exceeds a claim. If none does, that does not prove privacy: another
        audit may find more."""
        return any(found.refuted_by for found in self.observations)

    @property
    def shown(self) -> list[Judgement]:
        """The judgements to print: the run, the first ten rounds, and all refuted ones."""
        *rounds, run = self.observations
        return [
            *(found for number, found in enumerate(rounds) if found.refuted_by or number < SHOWN),
            run,
        ]

    def lines(self) -> Iterator[str]:
        """The lines below the table: the assumptions of each bound, and the verdict."""
        run = self.observations[-1]
        if left := len(self.observations) - len(self.shown):
            yield f"{left} more rounds are in audit.json"
        yield f"{self.mechanism}, {run.adjacency}, delta {run.delta:g}; interval and bounds at 95 %"
        yield from (f"bound: {method} assumes {ASSUMES[method]}" for method in run.bounds)
        rate = f"false-alarm rate {self.false_alarm:g}"
        if self.refuted:
            yield (
                f"REFUTED ({rate}): "
                f"{', '.join(found.name for found in self.observations if found.refuted_by)}"
            )
        elif self.finds:
            yield f"not refuted: no bound passes its claim ({rate}); this is no proof"
        else:
            yield (
                "no verdict: nothing was found, and nothing could have been: the first line says "
                "why"
            )


def judge(experiment: Experiment, *, false_alarm: float = FALSE_ALARM) -> Verdict:
    """Compares each claim with the estimate and the lower bounds. `false_alarm` is within (0,
    `SIGNIFICANCE`]."""
    releases = experiment.releases
    count = len(experiment.observations)
    levels = levels_of(count - 1, false_alarm=false_alarm)
    *rounds, run = (
        _judged(*each, releases) for each in zip(experiment.observations, levels, strict=True)
    )
    told = (
        each if each.refuted_by else replace(each, estimate=None, interval=None) for each in rounds
    )
    scores = experiment.observations[-1].scores
    canaries = len(scores.seen if releases.repeated else scores.values)
    power = power_of(releases, canaries, level=levels[-1])
    return Verdict(experiment.mechanism, (*told, run), false_alarm, *power)


def outlook(releases: Releases, count: int, *, rounds: int = 0) -> str:
    """The power of an audit with `rounds` observed rounds, in words, at the default false-alarm
    rate."""
    return power_of(releases, count, level=levels_of(rounds, false_alarm=FALSE_ALARM)[-1])[0]


def levels_of(rounds: int, *, false_alarm: float) -> list[float]:
    """The level of each bound for the observations of a number of rounds, and of the run after
    them.

    The run has half of the false-alarm rate and the rounds share the other half, each evenly over
    its bounds (Bonferroni). Without separate rounds the run has all of it.

    >>> levels_of(0, false_alarm=0.03), levels_of(2, false_alarm=0.12)
    ([0.01], [0.01, 0.01, 0.02])
    """
    share = false_alarm / MOST_BOUNDS
    if rounds == 0:
        return [share]
    return [*[share / 2 / rounds] * rounds, share / 2]


def _judged(seen: Observation, level: float, releases: Releases) -> Judgement:
    fit = _fit(releases, seen.scores)
    claim = seen.claim
    bounds = {
        method: {"epsilon": bound(significance=SIGNIFICANCE), "strict": bound(significance=level)}
        for method, bound in _methods(seen, releases, fit)
    }
    estimate = None
    interval = None
    if fit:
        estimate = fit.epsilon(delta=claim.delta)
        interval = fit.interval(delta=claim.delta, level=1 - SIGNIFICANCE)
    refuted = tuple(method for method, bound in bounds.items() if bound["strict"] > claim.epsilon)
    return Judgement(
        seen.name, claim.epsilon, claim.delta, claim.adjacency, estimate, interval, bounds, refuted
    )


def _fit(releases: Releases, scores: Scores) -> GaussianFit | None:
    """Gaussians fitted to scores; None if the noise or the scores are not Gaussian, or if there are
    fewer than `ENOUGH` scores, with which no power of the fit is claimed."""
    if releases.noise_multiplier is None or len(scores.values) < ENOUGH:
        return None
    return fit_gaussians(scores)


def _methods(
    seen: Observation, releases: Releases, fit: GaussianFit | None
) -> Iterator[tuple[str, Callable[..., float]]]:
    claim = seen.claim
    scores = seen.scores
    if releases.repeated:
        yield REPEATED, partial(repeated_bound, scores, delta=claim.delta)
    else:
        gaussian = releases.noise_multiplier is not None
        for method, bound in ((ONE_RUN, one_run_bound), (FDP, fdp_bound))[: 1 + gaussian]:
            made = planned_guesses(
                len(scores.values), claim.epsilon, claim.delta, shifts=method == FDP
            )
            yield method, partial(bound, guess_membership(scores, made=made), delta=claim.delta)
    if fit is not None:
        yield FIT, partial(fit.lower_bound, delta=claim.delta)


def power_of(releases: Releases, count: int, *, level: float) -> tuple[str, bool]:
    """The faults that an audit with bounds at this level can find, in words, and True if there are
    any. `count`: the canaries of all runs together; for a repeated release the number of
    repetitions with the canary, which is also that without."""
    claimed = releases.claim.epsilon
    if not claimed < math.inf:
        return "it could have found nothing: there is no claim", False
    many = f"{count} canaries"
    scores = count
    if releases.repeated:
        many = f"{count} releases with the canary and as many without"
        scores = 2 * count
    fitted = _fitted(releases, scores, level)
    if scores < ENOUGH:
        few = f"; they are too few for the Gaussian fit, which needs {ENOUGH}"
    else:
        few = ""
    shown = _shown_without_noise(releases, count, level)
    without = (
        f"without any noise {many} show epsilon {shown:.3g} on average (at the verdict's level, "
        f"without the Gaussian fit), and {claimed:.4g} is claimed"
    )
    if not fitted and shown <= claimed:
        enough = _enough_in_words(releases, level)
        return f"it could have found nothing: even {without}{few}; {enough}", False
    return f"what it could have found: {without}{fitted or few}", True


def _fitted(releases: Releases, canaries: int, level: float) -> str:
    """The faults that the Gaussian fit can find, in words; empty if there are none."""
    share = smallest_fault(releases, canaries, level=level)
    if share is None:
        return ""
    needed = _needed(releases, HALF, level)
    said = (
        f"; in nine of ten audits they refute the claim if noise has {share:.0%} of its size or "
        "less; "
    )
    if needed is None:
        return f"{said}noise at half its size is not found by any number of them"
    return f"{said}for noise at half its size {needed} are needed"


def _needed(releases: Releases, share: float, level: float) -> int | None:
    """The smallest number of canaries, or of releases with the canary, with which nine of ten fits
    find noise at a share of its size; None if no number is enough."""
    numbers = range(ENOUGH, MOST_CANARIES + 1)
    place = bisect_left(
        numbers, True, key=lambda number: _excess(releases, share, number, level) > 0
    )
    if place == len(numbers):
        return None
    return -(-numbers[place] // (1 + releases.repeated))


def _enough_in_words(releases: Releases, level: float) -> str:
    """The number of canaries with which an audit could find at least that noise is missing."""
    if releases.noise_multiplier is None:
        return "ask for more --canaries or --runs"
    needed = _needed(releases, LEAST_SHARE, level)
    if needed is None:
        return (
            "the Gaussian fit would find missing noise with no number of them: audit more rounds, "
            "or a smaller epsilon"
        )
    return (
        f"with {needed} the Gaussian fit would find missing noise: ask for more --canaries or "
        "--runs"
    )


def smallest_fault(releases: Releases, canaries: int, *, level: float) -> float | None:
    """The largest share of the noise's size, within (0, 1], that nine of ten audits detect as too
    small by the Gaussian fit; None if not even missing noise would be detected. `level`: one-sided
    level of the fit's lower bound."""

    def excess(share: float) -> float:
        return _excess(releases, share, canaries, level)

    if releases.noise_multiplier is None or canaries < ENOUGH or excess(LEAST_SHARE) <= 0:
        return None
    if excess(1.0) < 0:
        return float(brentq(excess, LEAST_SHARE, 1.0, xtol=1e-6))
    return 1.0


def _excess(releases: Releases, share: float, canaries: int, level: float) -> float:
    """Above 0 if nine of ten fits exceed the claim by enough to refute it."""
    claimed = shift_of_epsilon(releases.claim.epsilon, delta=releases.claim.delta)
    true = releases.shift(share)
    # The errors of fitted shifts, with half of the canaries out: see `GaussianFit.interval`.
    of_claimed, of_true = (
        math.sqrt((4 if releases.repeated else 2) / canaries + shift**2 / (2 * canaries))
        for shift in (claimed, true)
    )
    return float(true - norm.isf(1 - POWER) * of_true - claimed - norm.isf(level) * of_claimed)


def _shown_without_noise(releases: Releases, count: int, level: float) -> float:
    """The largest of the bounds that assume nothing about scores, if drawn canaries are seen
    without any noise, for an average number of them."""
    seen = 1 - (1 - releases.probability) ** releases.rounds
    claim = releases.claim
    if releases.repeated:
        drawn = np.arange(1, count + 1) * seen % 1 < seen  # a share `seen`, evenly spread
        scores = Scores(
            np.concatenate([drawn.astype(float), np.zeros(count)]), np.arange(2 * count) < count
        )
        return repeated_bound(scores, delta=claim.delta, significance=level)
    found = []
    for shifts in (False,) if releases.noise_multiplier is None else (False, True):
        made = planned_guesses(count, claim.epsilon, claim.delta, shifts=shifts)
        drawn_in = count * seen / 2
        said_in = made - made // 2
        right = min(said_in, drawn_in) + (max(said_in - drawn_in, 0) * (1 - seen) + made // 2) / (
            2 - seen
        )
        guesses = Guesses(count, made, min(made, round(right)))
        if shifts:
            bound = fdp_bound
        else:
            bound = one_run_bound
        found.append(bound(guesses, delta=claim.delta, significance=level))
    return max(found)


def score_picture(experiment: Experiment) -> Picture:
    """Two histograms, as densities, of the scores of the whole run, in and out, with the fitted
    Gaussians."""
    scores = experiment.observations[-1].scores
    edges = np.histogram_bin_edges(scores.values, BINS)

    def draw(axes: Any) -> str:
        for number, (name, values) in enumerate({"out": scores.unseen, "in": scores.seen}.items()):
            axes.hist(
                values,
                edges,
                density=True,
                color=SERIES[number],
                alpha=0.35,
                label=f"{name}: {len(values)}",
            )
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xlabel("score: what all releases say of a canary")
        axes.set_ylabel("density")
        fit = _fit(experiment.releases, scores)
        at = np.linspace(edges[0], edges[-1], 200)
        for number, normal in enumerate((fit.unseen, fit.seen) if fit else ()):
            axes.plot(at, norm.pdf(at, normal.mean, normal.spread), color=SERIES[number])
        if fit:
            return _NOTE
        return ""

    return picture(f"Scores of canaries, {experiment.mechanism}", draw)


def write_audit(folder: Path, experiment: Experiment, verdict: Verdict) -> None:
    """Writes both files into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "discreet": __version__,
        "settings": experiment.settings,
        "level": 1 - SIGNIFICANCE,
        "assumes": ASSUMES,
    }
    write_json(folder / RECORD, facts | asdict(verdict) | {"refuted": verdict.refuted})
    replace_file(folder / PICTURE, score_picture(experiment).svg.encode())
