"""What events cost: published numbers, noise for a target, schedules, sums of discrete
Gaussians."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm

from discreet.accounting.accounting import PRIMIHUB_ORDERS, epsilon_spent, pure_epsilon, rdp_epsilon
from discreet.accounting.calibration import (
    epsilon_schedule,
    noise_multiplier_for_epsilon,
    rounds_within,
)
from discreet.accounting.distributed_gaussian import (
    DistributedDiscreteGaussianDpEvent,
    convolution_gap,
)
from discreet.accounting.events import ACCOUNTANTS, fixed_size_round_event, poisson_round_event
from discreet.privacy.secure_grid import SecureCohort, secure_sum

TABLE = Path(__file__).parents[1] / "reference" / "published_epsilons.csv"
PUBLISHED = [*csv.DictReader(TABLE.read_text().splitlines())]
BOTH = pytest.mark.parametrize("accountant", list(ACCOUNTANTS))
ROUND = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.5))
MASKED = DistributedDiscreteGaussianDpEvent(
    variance=10**6, summands=7, sensitivity_squared=10**6, dimension=1000
)


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Balle and Wang 2018, Theorem 8: the delta of a Gaussian release with that noise over
    sensitivity."""
    upper = norm.cdf(1 / (2 * noise) - epsilon * noise)
    return float(upper - math.exp(epsilon) * norm.cdf(-1 / (2 * noise) - epsilon * noise))


def entries_of(row: dict[str, str]) -> list[tuple[DpEvent, int]]:
    return [
        (
            PoissonSampledDpEvent(float(row["q"]), GaussianDpEvent(float(row["sigma"]))),
            int(row["T"]),
        )
    ]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
@pytest.mark.parametrize(("accountant", "column"), [("pld", "pld"), ("rdp", "rdp_improved")])
def test_published_settings_cost_what_the_table_says(
    row: dict[str, str], accountant: str, column: str
) -> None:
    epsilon = epsilon_spent(entries_of(row), delta=float(row["delta"]), accountant=accountant)
    assert epsilon == pytest.approx(float(row[column]), rel=1e-3)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
def test_older_published_epsilons_follow_from_the_classic_conversion(row: dict[str, str]) -> None:
    orders = range(2, 34) if row["published_kind"] == "moments" else PRIMIHUB_ORDERS
    epsilon = rdp_epsilon(entries_of(row), delta=float(row["delta"]), orders=orders, classic=True)
    assert epsilon == pytest.approx(float(row["rdp_classic"]), rel=1e-5)


def test_a_fixed_cohort_costs_the_known_number_and_not_the_uncorrected_one() -> None:
    ours = fixed_size_round_event(120, population_size=3383, noise_multiplier=1.2)
    uncorrected = SampledWithoutReplacementDpEvent(3383, 120, GaussianDpEvent(1.2))
    assert epsilon_spent([(ours, 100)], delta=1e-5, accountant="rdp") == pytest.approx(
        14.09, abs=6e-3
    )
    assert epsilon_spent([(uncorrected, 100)], delta=1e-5, accountant="rdp") == pytest.approx(
        3.56, abs=6e-3
    )


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
def test_a_fixed_cohort_without_the_correction_costs_too_little(noise: float) -> None:
    ours = fixed_size_round_event(50, population_size=50, noise_multiplier=noise)
    uncorrected = SampledWithoutReplacementDpEvent(50, 50, GaussianDpEvent(noise))
    epsilon, too_little = (
        epsilon_spent([(event, 1)], delta=1e-5, accountant="rdp") for event in (ours, uncorrected)
    )
    assert gaussian_delta(epsilon, noise / 2) <= 1e-5  # noise over the sensitivity 2C
    assert gaussian_delta(too_little, noise / 2) > 1e-4


@BOTH
def test_neither_merging_nor_order_nor_nesting_changes_epsilon(accountant: str) -> None:
    other = GaussianDpEvent(4.0) if accountant == "pld" else MASKED
    nested = ComposedDpEvent(
        [SelfComposedDpEvent(ROUND, 2), other, SelfComposedDpEvent(NoOpDpEvent(), 5)]
    )
    spelled = [
        [(ROUND, 4), (other, 2)],
        [(other, 1), (ROUND, 1), (ROUND, 3), (other, 1)],
        [(nested, 2)],
        [(ROUND, 4), (other if other is MASKED else PoissonSampledDpEvent(1.0, other), 2)],
    ]
    epsilons = [epsilon_spent(entries, delta=1e-5, accountant=accountant) for entries in spelled]
    assert epsilons == pytest.approx([epsilons[0]] * 4, rel=1e-12)


OF_NOBODY = SampledWithoutReplacementDpEvent(10, 0, GaussianDpEvent(1.0))
NOTHING = [NoOpDpEvent(), PoissonSampledDpEvent(0.0, GaussianDpEvent(1.0)), OF_NOBODY]
WITHOUT_NOISE = SampledWithoutReplacementDpEvent(10, 1, GaussianDpEvent(0.0))
NO_NOISE = [
    NonPrivateDpEvent(),
    LaplaceDpEvent(0.0),
    PoissonSampledDpEvent(0.1, GaussianDpEvent(0.0)),
    WITHOUT_NOISE,
]


@BOTH
def test_what_releases_nothing_costs_nothing_and_what_has_no_noise_costs_everything(
    accountant: str,
) -> None:
    for entries in ([], [(ROUND, 0), (NonPrivateDpEvent(), 0)], [(event, 3) for event in NOTHING]):
        assert epsilon_spent(entries, delta=1e-5, accountant=accountant) == 0.0
    for event in NO_NOISE:
        assert (
            epsilon_spent([(event, 1), (ROUND, 1)], delta=1e-5, accountant=accountant) == math.inf
        )
        assert pure_epsilon([(event, 1)]) == math.inf


def test_pure_epsilons_of_laplace_releases_alone_add_up() -> None:
    entries = [(LaplaceDpEvent(2.0), 3), (LaplaceDpEvent(10.0), 5), (NoOpDpEvent(), 4), (ROUND, 0)]
    assert pure_epsilon(entries) == pytest.approx(2.0, rel=1e-15)
    for event in (ROUND, MASKED, PoissonSampledDpEvent(0.5, LaplaceDpEvent(1.0))):
        assert pure_epsilon([*entries, (event, 1)]) == math.inf


FIXED = fixed_size_round_event(1, population_size=9, noise_multiplier=1.0)
UNKNOWN = "no accountant knows"


@pytest.mark.parametrize(
    ("event", "given", "message"),
    [
        *(
            (ROUND, {"delta": delta}, "delta must be between 0 and 1")
            for delta in (0.0, 1.0, math.nan)
        ),
        (ROUND, {"accountant": "moments"}, "pld, rdp"),
        *(
            (ROUND, {"count": count}, "count must be a whole number of at least 0")
            for count in (-1, 2.0)
        ),
        (
            PoissonSampledDpEvent(
                0.1, ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(2.0)])
            ),
            {},
            UNKNOWN,
        ),
        (GaussianDpEvent(math.nan), {}, "must be"),
        (PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)), {}, "must be"),
        (SampledWithoutReplacementDpEvent(10, 11, GaussianDpEvent(1.0)), {}, "does not exist"),
        (FIXED, {}, "choose 'rdp'"),
        (MASKED, {}, "choose 'rdp'"),
        (ComposedDpEvent([MASKED, FIXED]), {"accountant": "rdp"}, "do not share"),
        (PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)), {"accountant": "rdp"}, "choose 'pld'"),
    ],
)
def test_what_has_no_epsilon_is_refused_with_the_reason(
    event: DpEvent, given: dict[str, Any], message: str
) -> None:
    how = {"count": 1, "delta": 1e-5, **given}
    with pytest.raises(ValueError, match=message):
        epsilon_spent([(event, how.pop("count"))], **how)


@BOTH
@pytest.mark.parametrize("noise", [1e-300, 1e-6, 1e300])
@pytest.mark.parametrize("probability", [5e-324, 0.5, 1 - 2**-53])
def test_extreme_parameters_are_answered(accountant: str, noise: float, probability: float) -> None:
    event = PoissonSampledDpEvent(probability, GaussianDpEvent(noise))
    assert epsilon_spent([(event, 10)], delta=1e-5, accountant=accountant) >= 0


def sampled(noise: float) -> DpEvent:
    return poisson_round_event(0.05, noise_multiplier=noise)


def fixed(noise: float) -> DpEvent:
    return fixed_size_round_event(50, population_size=1000, noise_multiplier=noise)


def masked(noise: float) -> DpEvent:
    return secure_sum(5000, SecureCohort(20, 15), noise_multiplier=noise).event_of()


@pytest.mark.parametrize(
    ("make_event", "accountant", "target"),
    [
        (sampled, "pld", 8.0),
        (sampled, "rdp", 0.3),
        (fixed, "rdp", 2.0),
        (LaplaceDpEvent, "pld", 2.0),
        (masked, "rdp", 2.0),
    ],
)
def test_the_noise_for_an_epsilon_is_the_smallest_to_a_ten_thousandth(
    make_event: type[DpEvent], accountant: str, target: float
) -> None:
    def epsilon(noise: float) -> float:
        return epsilon_spent([(make_event(noise), 100)], delta=1e-5, accountant=accountant)

    noise = noise_multiplier_for_epsilon(
        target,
        releases=lambda noise: ((make_event(noise), 100),),
        delta=1e-5,
        accountant=accountant,
    )
    assert epsilon(noise) <= target < epsilon(noise * (1 - 1e-4))


@pytest.mark.parametrize(
    ("target", "event", "message"),
    [
        (1e-9, sampled, "1e-09 is out of reach: with noise_multiplier"),
        (1e9, GaussianDpEvent, "asks for no noise"),
        *(
            (target, sampled, "target_epsilon must be finite and above 0")
            for target in (0.0, math.nan)
        ),
    ],
)
def test_a_target_without_a_noise_multiplier_is_refused(
    target: float, event: type[DpEvent], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        noise_multiplier_for_epsilon(
            target, releases=lambda noise: ((event(noise), 100),), delta=1e-12
        )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_rounds_of_a_budget_fit_and_one_more_does_not(accountant: str) -> None:
    def epsilon(count: int) -> float:
        return epsilon_spent([(sampled(1.1), count)], delta=1e-5, accountant=accountant)

    rounds = rounds_within(3.0, epsilon)
    assert rounds > 10
    assert epsilon(rounds) <= 3.0 < epsilon(rounds + 1)
    assert rounds_within(0.0, epsilon) == 0


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 1e5), st.sampled_from(["uniform", "geometric"]), st.integers(1, 300))
def test_what_a_schedule_spends_is_its_total_and_never_more(
    total: float, kind: str, rounds: int
) -> None:
    schedule = epsilon_schedule(total, kind=kind, rounds=rounds)
    spent = pure_epsilon([(LaplaceDpEvent(1 / epsilon), 1) for epsilon in schedule])
    assert len(schedule) == rounds
    assert total * (1 - 1e-11) <= spent <= total


Event = DistributedDiscreteGaussianDpEvent


def discrete(variance: float, reach: int) -> NDArray[np.float64]:
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    return weights / weights.sum()


def of_sum(variance: int, summands: int) -> NDArray[np.float64]:
    """The probabilities of a sum, up to 22 standard deviations of a summand to either side:
    positive products added up, so right to a few units in the last place each, far into the
    tails."""
    reach = 30 * math.isqrt(variance) + 10
    one = total = discrete(variance, reach)
    for _ in range(summands - 1):
        total = np.convolve(total, one, mode="same")
    return total[reach // 4 : -(reach // 4)]  # without what the ends of the range spoil


def exact_divergence(variance: int, summands: int, moved: int, order: float) -> float:
    """The Renyi divergence between the sum moved by some steps and the sum."""
    law = np.log(of_sum(variance, summands))
    terms = order * law[: len(law) - moved] + (1 - order) * law[moved:]
    return float(np.logaddexp.reduce(terms)) / (order - 1)


CASES = [(v, h, x) for v in (1, 2, 5) for h in (1, 2, 5) for x in (1, 2)]


@pytest.mark.parametrize(("variance", "summands", "moved"), CASES)
@pytest.mark.parametrize("order", [1.25, 2.0, 6.0])
def test_the_bound_holds_and_is_less_than_half_a_per_cent_above_the_exact_divergence(
    variance: int, summands: int, moved: int, order: float
) -> None:
    event = Event(variance, summands, sensitivity_squared=moved**2, dimension=1)
    bound = order / 2 / event.renyi_noise_multiplier**2
    exact = exact_divergence(variance, summands, moved, order)
    assert exact <= bound * (1 + 1e-12) <= exact * 1.005


@pytest.mark.parametrize(("variance", "summands"), [(1, 2), (1, 3), (1, 6), (2, 2)])
def test_half_of_tau_bounds_the_log_ratio_of_a_sum_to_one_discrete_gaussian(
    variance: int, summands: int
) -> None:
    found = of_sum(variance, summands)
    ratio = float(np.abs(np.log(found / discrete(variance * summands, len(found) // 2))).max())
    assert 1e-9 < ratio <= convolution_gap(variance, summands) / 2
    assert summands > 2 or ratio > convolution_gap(variance, summands) / 6


def test_several_coordinates_cost_at_least_the_sum_of_their_exact_divergences() -> None:
    """One step in each of four coordinates out of nine: Delta^2 = 4, and no more than four
    differ."""
    event = Event(1, 3, sensitivity_squared=4, dimension=9)
    bound = 2.0 / 2 / event.renyi_noise_multiplier**2
    assert 4 * exact_divergence(1, 3, 1, 2.0) <= bound <= 4.05 * exact_divergence(1, 3, 1, 2.0)
    assert (
        event.renyi_noise_multiplier
        == Event(1, 3, sensitivity_squared=4, dimension=4).renyi_noise_multiplier
    )
    assert (
        event.renyi_noise_multiplier
        < Event(1, 3, sensitivity_squared=4, dimension=1).renyi_noise_multiplier
    )


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_a_secure_aggregation_round_costs_a_continuous_gaussian_within_one_per_cent(
    noise: float,
) -> None:
    event = secure_sum(10_000, SecureCohort(10, 7), noise_multiplier=noise).event_of()
    spent = epsilon_spent([(event, 30)], delta=1e-5, accountant="rdp")
    central = epsilon_spent([(GaussianDpEvent(noise), 30)], delta=1e-5, accountant="rdp")
    assert 0.99 * central < spent < 1.01 * central


@pytest.mark.parametrize("delta", [1e-20, 1e-23, 1e-30, 1e-100, 1e-300])
@pytest.mark.parametrize(("probability", "count"), [(0.1, 100), (0.01, 1000), (1.0, 10)])
def test_a_small_delta_costs_by_pld_no_more_than_by_rdp(
    delta: float, probability: float, count: int
) -> None:
    entries = [(poisson_round_event(probability, noise_multiplier=3.0), count)]
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    bound = accountant.compose(entries[0][0], count).get_epsilon(delta)
    spent = epsilon_spent(entries, delta=delta)
    assert 0 < spent <= bound * (1 + 1e-6)
    assert spent >= epsilon_spent(entries, delta=1e-18)  # of a larger delta


def test_sampled_laplace_releases_have_an_epsilon_at_a_small_delta() -> None:
    entries = [(PoissonSampledDpEvent(0.1, LaplaceDpEvent(2.0)), 10)]
    assert 0 < epsilon_spent(entries, delta=1e-25) <= 10 / 2.0
