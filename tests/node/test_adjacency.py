"""For which neighbours the epsilon of DP-SGD holds: pairs of data sets of one client, composed
exactly.

The oracle shares nothing with the accountant. Of two worlds it has the densities of a step's noised
sum in closed form: with probability q an example's gradient, at a given angle to those of all
others, which are aligned. The moment generating function of the privacy loss of all steps is
inverted along a line at which its terms are small (Bromwich), which gives delta for an epsilon
without rounding any loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, special, stats

from discreet.accounting.accounting import epsilon_spent
from discreet.training.local_training import (
    ExamplePrivacy,
    LocalSettings,
    example_event,
    sampling_probability,
)

Values = NDArray[np.float64]
SPACING, LENGTH = 0.1, 250  # of the line along which the function is inverted


@dataclass(frozen=True)
class Case:
    """A client of n examples, and what removing one costs in truth: `literal`, at an angle that
    makes it worst."""

    n: int
    batch_size: int
    noise_multiplier: float
    steps: int
    delta: float
    angle: float
    literal: float

    def how(self, declared: int | None = None) -> LocalSettings:
        private = ExamplePrivacy(1.0, self.noise_multiplier, public_num_examples=declared)
        return LocalSettings(1, self.batch_size, 0.1, 0.0, private)

    def accounted(self, declared: int | None = None, *, fewer: int = 0) -> float:
        """What a client with `fewer` examples than n says that the steps cost."""
        event = example_event(self.n - fewer, self.how(declared))
        return epsilon_spent([(event, self.steps)], delta=self.delta)

    def worlds(
        self, declared: int | None = None, *, others: int | None = None
    ) -> tuple[Values, Values]:
        """Log densities with the example and without it, where `others` (all, unless given) have a
        gradient."""
        rest = self.n - 1 if others is None else others
        more, fewer = (sampling_probability(self.n - gone, self.how(declared)) for gone in (0, 1))
        return self.log_density(rest, more, own=more), self.log_density(rest, fewer, own=0.0)

    @property
    def axes(self) -> tuple[Values, Values]:
        reach, spacing = 10 * self.noise_multiplier + 10, self.noise_multiplier / 1.5
        top = self.batch_size + 8 * math.sqrt(self.batch_size) + reach
        return np.arange(-reach, top, spacing), np.arange(-reach, reach, spacing)

    def log_density(self, others: int, probability: float, *, own: float) -> Values:
        """Of the noised sum, on the grid of `axes`: (points,)."""
        (x, y), at = self.axes, np.arange(others + 1)
        chances = stats.binom.logpmf(at, others, probability)

        def shifted(by_x: float, by_y: float) -> Values:
            along = stats.norm.logpdf(x[:, None] - by_x, at, self.noise_multiplier)
            mixed: Values = special.logsumexp(along + chances, axis=1)
            across: Values = stats.norm.logpdf(y - by_y, 0, self.noise_multiplier)
            return np.add.outer(mixed, across).ravel()

        without = shifted(0, 0)
        if own == 0:
            return without
        turn = math.radians(self.angle)
        return np.logaddexp(
            math.log1p(-own) + without, math.log(own) + shifted(math.cos(turn), math.sin(turn))
        )

    def true_delta(self, epsilon: float, worlds: tuple[Values, Values]) -> float:
        """The larger of both directions."""
        return max(self._hockey_stick(epsilon, worlds), self._hockey_stick(epsilon, worlds[::-1]))

    def _hockey_stick(self, epsilon: float, worlds: tuple[Values, Values]) -> float:
        one, other = worlds
        cell = math.log(math.prod(axis[1] - axis[0] for axis in self.axes))

        def exponent(s: NDArray[np.complex128] | Values) -> NDArray[np.complex128]:
            moments = special.logsumexp(np.outer(1 + s, one) - np.outer(s, other), axis=1) + cell
            return np.asarray(self.steps * moments - s * epsilon, dtype=np.complex128)

        def height(real: float) -> float:
            return float(exponent(np.array([real]))[0].real) - math.log(real * (real + 1))

        real = optimize.minimize_scalar(height, bounds=(0.05, 60), method="bounded").x
        line = real + 1j * SPACING * np.arange(LENGTH)
        terms = np.exp(exponent(line)) / (line * (line + 1))
        assert abs(terms[-1]) < 1e-6 * self.delta
        return float((terms.real.sum() - terms[0].real / 2) * SPACING / math.pi)


CASES = {
    "100 examples, 3000 steps": Case(100, 8, 4.0, 3000, 1e-5, 180, 8.90),
    "100 examples, 2000 steps": Case(100, 8, 3.0, 2000, 1e-5, 180, 8.68),
    "91 examples, 120 steps": Case(91, 16, 2.0, 120, 1e-4, 105, 4.65),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@cases
def test_for_zero_out_neighbours_the_epsilon_holds_and_is_met(case: Case) -> None:
    # n stays, so both worlds sample with the same probability; where the others are known, nothing
    # hides the example.
    probability = sampling_probability(case.n, case.how())
    worlds = (
        case.log_density(0, probability, own=probability),
        case.log_density(0, probability, own=0.0),
    )
    assert case.true_delta(case.accounted(), worlds) == pytest.approx(case.delta, rel=1e-3)
    crowd = (
        case.log_density(case.n - 1, probability, own=probability),
        case.log_density(case.n - 1, probability, own=0),
    )
    assert case.true_delta(case.accounted(), crowd) < case.delta


@cases
def test_for_a_real_removal_without_a_declared_number_it_does_not_hold(case: Case) -> None:
    worlds = case.worlds()
    said = max(case.accounted(), case.accounted(fewer=1))
    assert case.true_delta(said, worlds) > 3 * case.delta
    assert case.true_delta(case.literal, worlds) == pytest.approx(case.delta, rel=0.05)


@cases
@pytest.mark.parametrize("declared", [64, 200])
def test_for_a_real_removal_with_a_declared_number_it_holds(case: Case, declared: int) -> None:
    assert case.accounted(declared, fewer=1) == case.accounted(declared)
    assert case.true_delta(case.accounted(declared), case.worlds(declared)) < case.delta
    alone = case.worlds(declared, others=0)
    assert case.true_delta(case.accounted(declared), alone) == pytest.approx(case.delta, rel=1e-3)
