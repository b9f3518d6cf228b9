from __future__ import annotations

import json
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
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    UnsupportedDpEvent,
    ZCDpEvent,
)
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from discreet.privacy.accounting import MOMENTS_ORDERS, PRIMIHUB_ORDERS, epsilon_spent, pure_epsilon, rdp_epsilon
from discreet.privacy.events import ACCOUNTANTS, fixed_size_round_event, poisson_round_event

PUBLISHED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "reference" / "published_epsilons.json").read_text()
)
BOTH = pytest.mark.parametrize("accountant", list(ACCOUNTANTS))
ROUND = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.5))


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Balle and Wang 2018, Theorem 8: the delta of a Gaussian release with that noise over sensitivity."""
    upper = norm.cdf(1 / (2 * noise) - epsilon * noise)
    return float(upper - math.exp(epsilon) * norm.cdf(-1 / (2 * noise) - epsilon * noise))


def entries_of(row: dict[str, Any]) -> list[tuple[DpEvent, int]]:
    return [(PoissonSampledDpEvent(row["q"], GaussianDpEvent(row["sigma"])), row["T"])]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
@pytest.mark.parametrize(("accountant", "column"), [("pld", "pld"), ("rdp", "rdp_improved")])
def test_published_settings_cost_what_the_table_says(row: dict[str, Any], accountant: str, column: str) -> None:
    epsilon = epsilon_spent(entries_of(row), delta=row["delta"], accountant=accountant)
    assert epsilon == pytest.approx(row[column], rel=1e-3)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
def test_older_published_epsilons_follow_from_the_classic_conversion(row: dict[str, Any]) -> None:
    orders = MOMENTS_ORDERS if row["published_kind"] == "moments" else PRIMIHUB_ORDERS
    epsilon = rdp_epsilon(entries_of(row), delta=row["delta"], orders=orders, classic=True)
    assert epsilon == pytest.approx(row["rdp_classic"], rel=1e-5)


@pytest.mark.parametrize(
    ("event", "count", "delta", "pld", "rdp"),
    [
        (PoissonSampledDpEvent(0.1, GaussianDpEvent(3.0)), 512, 1e-6, 3.7697, 4.0510),
        (PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1)), 1000, 1e-5, 1.5154, 1.7118),
        (PoissonSampledDpEvent(120 / 3383, GaussianDpEvent(1.2)), 100, 1e-5, 1.707, 1.986),
    ],
)
def test_both_accountants_give_the_known_numbers(
    event: DpEvent, count: int, delta: float, pld: float, rdp: float
) -> None:
    assert epsilon_spent([(event, count)], delta=delta, accountant="pld") == pytest.approx(pld, rel=4e-4)
    assert epsilon_spent([(event, count)], delta=delta, accountant="rdp") == pytest.approx(rdp, rel=4e-4)


def test_without_amplification_the_price_is_the_known_one() -> None:
    assert epsilon_spent([(GaussianDpEvent(1.2), 100)], delta=1e-5) == pytest.approx(69.46, abs=5e-3)


def test_a_fixed_cohort_costs_the_known_number_and_not_the_uncorrected_one() -> None:
    ours = fixed_size_round_event(120, population_size=3383, noise_multiplier=1.2)
    uncorrected = SampledWithoutReplacementDpEvent(3383, 120, GaussianDpEvent(1.2))
    assert epsilon_spent([(ours, 100)], delta=1e-5, accountant="rdp") == pytest.approx(14.09, abs=6e-3)
    assert epsilon_spent([(uncorrected, 100)], delta=1e-5, accountant="rdp") == pytest.approx(3.56, abs=6e-3)


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
def test_a_fixed_cohort_of_everybody_costs_at_least_the_exact_gaussian_of_sensitivity_2c(
    noise: float,
) -> None:
    ours = fixed_size_round_event(50, population_size=50, noise_multiplier=noise)
    epsilon = epsilon_spent([(ours, 1)], delta=1e-5, accountant="rdp")
    assert gaussian_delta(epsilon, noise / 2) <= 1e-5  # noise over the sensitivity 2C


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
def test_a_fixed_cohort_without_the_correction_costs_too_little(noise: float) -> None:
    uncorrected = SampledWithoutReplacementDpEvent(50, 50, GaussianDpEvent(noise))
    epsilon = epsilon_spent([(uncorrected, 1)], delta=1e-5, accountant="rdp")
    assert gaussian_delta(epsilon, noise / 2) > 1e-4


@pytest.mark.parametrize("noise", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("count", [1, 100])
def test_gaussian_releases_cost_the_analytic_epsilon(noise: float, count: int) -> None:
    epsilon = epsilon_spent([(GaussianDpEvent(noise), count)], delta=1e-5)
    assert gaussian_delta(epsilon, noise / math.sqrt(count)) == pytest.approx(1e-5, rel=1e-6)


def test_much_noise_costs_nothing_at_a_generous_delta() -> None:
    assert epsilon_spent([(GaussianDpEvent(1000.0), 1)], delta=0.01) == 0.0


def test_the_orders_of_another_system_give_its_number() -> None:
    accountant = RdpAccountant(PRIMIHUB_ORDERS)
    accountant.compose(ROUND, 400)
    epsilon = rdp_epsilon([(ROUND, 400)], delta=1e-5, orders=PRIMIHUB_ORDERS)
    assert epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)


@BOTH
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(1e-8, 0.1))
def test_more_releases_never_cost_less(accountant: str, fewer: int, more: int, delta: float) -> None:
    fewer, more = sorted((fewer, more))
    low, high = (epsilon_spent([(ROUND, n)], delta=delta, accountant=accountant) for n in (fewer, more))
    assert low <= high * (1 + 1e-6)


@BOTH
@settings(max_examples=15, deadline=None)
@given(st.floats(1e-10, 0.5), st.floats(1e-10, 0.5))
def test_a_larger_delta_never_costs_more(accountant: str, one: float, other: float) -> None:
    strict, generous = sorted((one, other))
    high, low = (epsilon_spent([(ROUND, 300)], delta=d, accountant=accountant) for d in (strict, generous))
    assert low <= high * (1 + 1e-6)


@BOTH
def test_neither_merging_nor_order_nor_nesting_changes_epsilon(accountant: str) -> None:
    other = GaussianDpEvent(4.0)
    nested = ComposedDpEvent([SelfComposedDpEvent(ROUND, 2), other, SelfComposedDpEvent(NoOpDpEvent(), 5)])
    spelled = [
        [(ROUND, 4), (other, 2)],
        [(other, 1), (ROUND, 1), (ROUND, 3), (other, 1)],
        [(nested, 2)],
    ]
    one, two, three = (epsilon_spent(entries, delta=1e-5, accountant=accountant) for entries in spelled)
    assert two == pytest.approx(one, rel=1e-12)
    assert three == pytest.approx(one, rel=1e-12)


@BOTH
def test_a_sampling_probability_of_one_is_no_sampling(accountant: str) -> None:
    plain = epsilon_spent([(GaussianDpEvent(2.0), 7)], delta=1e-5, accountant=accountant)
    everybody = PoissonSampledDpEvent(1.0, GaussianDpEvent(2.0))
    assert epsilon_spent([(everybody, 7)], delta=1e-5, accountant=accountant) == plain


@BOTH
@pytest.mark.parametrize(
    "entries",
    [
        [],
        [(NoOpDpEvent(), 3)],
        [(ROUND, 0)],
        [(NonPrivateDpEvent(), 0)],
        [(PoissonSampledDpEvent(0.0, GaussianDpEvent(1.0)), 3)],
        [(SampledWithoutReplacementDpEvent(10, 0, GaussianDpEvent(1.0)), 3)],
    ],
)
def test_what_releases_nothing_costs_nothing(accountant: str, entries: list[tuple[DpEvent, int]]) -> None:
    assert epsilon_spent(entries, delta=1e-5, accountant=accountant) == 0.0


@BOTH
@pytest.mark.parametrize(
    "event",
    [
        NonPrivateDpEvent(),
        GaussianDpEvent(0.0),
        LaplaceDpEvent(0.0),
        PoissonSampledDpEvent(0.1, GaussianDpEvent(0.0)),
        SampledWithoutReplacementDpEvent(10, 1, GaussianDpEvent(0.0)),
    ],
)
def test_what_has_no_noise_costs_everything(accountant: str, event: DpEvent) -> None:
    assert epsilon_spent([(event, 1), (ROUND, 1)], delta=1e-5, accountant=accountant) == math.inf
    assert pure_epsilon([(event, 1)]) == math.inf


def test_pure_epsilons_add_up() -> None:
    entries = [(LaplaceDpEvent(2.0), 3), (LaplaceDpEvent(10.0), 5), (NoOpDpEvent(), 4)]
    assert pure_epsilon(entries) == pytest.approx(2.0, rel=1e-15)
    assert pure_epsilon([]) == 0.0


@pytest.mark.parametrize("event", [GaussianDpEvent(1.0), ROUND, PoissonSampledDpEvent(0.5, LaplaceDpEvent(1.0))])
def test_only_laplace_releases_have_a_pure_epsilon(event: DpEvent) -> None:
    assert pure_epsilon([(event, 1), (LaplaceDpEvent(1.0), 1)]) == math.inf
    assert pure_epsilon([(event, 0), (LaplaceDpEvent(1.0), 1)]) == 1.0


@pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.2])
def test_one_laplace_release_costs_its_closed_form(delta: float) -> None:
    """Its delta is 1 - exp((epsilon - 1 / scale) / 2)."""
    epsilon = epsilon_spent([(LaplaceDpEvent(0.5), 1)], delta=delta)
    assert epsilon == pytest.approx(2.0 + 2 * math.log1p(-delta), rel=1e-5)


@BOTH
def test_many_laplace_releases_cost_less_than_their_pure_epsilons_together(accountant: str) -> None:
    entries = [(LaplaceDpEvent(20.0), 200)]
    assert epsilon_spent(entries, delta=1e-5, accountant=accountant) < pure_epsilon(entries) / 2


def test_few_laplace_releases_at_a_small_delta_cost_at_most_their_pure_epsilons() -> None:
    entries = [(LaplaceDpEvent(0.5), 2), (LaplaceDpEvent(2.0), 1)]
    assert epsilon_spent(entries, delta=1e-12) == pytest.approx(pure_epsilon(entries), rel=1e-4)


@BOTH
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, float("nan")])
def test_a_delta_out_of_range_is_refused(accountant: str, delta: float) -> None:
    with pytest.raises(ValueError, match="delta must be between 0 and 1"):
        epsilon_spent([], delta=delta, accountant=accountant)
    with pytest.raises(ValueError, match="delta must be between 0 and 1"):
        rdp_epsilon([(ROUND, 1)], delta=delta, classic=True)


def test_an_unknown_accountant_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match="pld, rdp"):
        epsilon_spent([(ROUND, 1)], delta=1e-5, accountant="moments")


@pytest.mark.parametrize("count", [-1, 2.0, True, np.float64(1), float("nan")])
def test_a_count_that_is_not_a_whole_number_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count must be a whole number of at least 0"):
        epsilon_spent([(ROUND, count)], delta=1e-5)


@BOTH
@pytest.mark.parametrize(
    "event",
    [
        UnsupportedDpEvent(),
        ZCDpEvent(0.1),
        PoissonSampledDpEvent(0.1, NoOpDpEvent()),
        PoissonSampledDpEvent(0.1, ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(2.0)])),
        SampledWithoutReplacementDpEvent(10, 1, LaplaceDpEvent(1.0)),
    ],
)
def test_an_event_that_no_accountant_knows_is_refused(accountant: str, event: DpEvent) -> None:
    with pytest.raises(ValueError, match="no accountant knows"):
        epsilon_spent([(event, 1)], delta=1e-5, accountant=accountant)


@pytest.mark.parametrize(
    "event",
    [
        GaussianDpEvent(float("nan")),
        GaussianDpEvent(-1.0),
        LaplaceDpEvent(float("inf")),
        PoissonSampledDpEvent(float("nan"), GaussianDpEvent(1.0)),
        PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)),
        SampledWithoutReplacementDpEvent(10, 11, GaussianDpEvent(1.0)),
        SelfComposedDpEvent(ROUND, -1),
        SelfComposedDpEvent(ROUND, 1.5),
    ],
)
def test_a_parameter_out_of_range_is_refused(event: DpEvent) -> None:
    with pytest.raises(ValueError, match=r"must be|does not exist"):
        epsilon_spent([(event, 1)], delta=1e-5)


def test_pld_refuses_a_fixed_cohort_and_names_the_accountant_that_does_not() -> None:
    with pytest.raises(ValueError, match="choose 'rdp'"):
        epsilon_spent([(fixed_size_round_event(1, population_size=9, noise_multiplier=1.0), 1)], delta=1e-5)


def test_rdp_refuses_sampled_laplace_and_names_the_accountant_that_does_not() -> None:
    event = PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0))
    with pytest.raises(ValueError, match="choose 'pld'"):
        epsilon_spent([(event, 1)], delta=1e-5, accountant="rdp")
    assert 0 < epsilon_spent([(event, 1)], delta=1e-5) < 1


@pytest.mark.parametrize("other", [ROUND, GaussianDpEvent(1.0)])
def test_events_of_different_adjacency_share_no_epsilon(other: DpEvent) -> None:
    fixed = fixed_size_round_event(1, population_size=9, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="replace one"):
        epsilon_spent([(fixed, 1), (other, 1)], delta=1e-5, accountant="rdp")


@pytest.mark.parametrize("orders", [(), (1.0, 2.0), (0.5,)])
def test_orders_that_are_not_above_one_are_refused(orders: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="orders must be above 1"):
        rdp_epsilon([(ROUND, 1)], delta=1e-5, orders=orders)


@BOTH
@pytest.mark.parametrize("noise", [1e-300, 1e-6, 1e300])
@pytest.mark.parametrize("probability", [5e-324, 0.5, 1 - 2**-53])
def test_extreme_parameters_are_answered(accountant: str, noise: float, probability: float) -> None:
    event = PoissonSampledDpEvent(probability, GaussianDpEvent(noise))
    assert epsilon_spent([(event, 10)], delta=1e-5, accountant=accountant) >= 0


@settings(max_examples=25, deadline=None)
@given(
    st.floats(1e-7, 1.0),
    st.floats(-2.0, 4.0).map(lambda power: 10.0**power),
    st.integers(1, 10**6),
    st.floats(-12.0, -0.01).map(lambda power: 10.0**power),
)
def test_pld_has_an_answer_for_every_setting(q: float, noise: float, count: int, delta: float) -> None:
    epsilon = epsilon_spent([(poisson_round_event(q, noise_multiplier=noise), count)], delta=delta)
    plain = epsilon_spent([(GaussianDpEvent(noise), count)], delta=delta)
    assert 0 <= epsilon < math.inf
    assert epsilon <= plain + 0.01 * max(1.0, plain)  # sampling never costs, but for the grid
