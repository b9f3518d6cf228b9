from __future__ import annotations

import itertools
import math

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, NoOpDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from discreet.privacy.accounting import epsilon_spent, pure_epsilon
from discreet.privacy.calibration import epsilon_schedule, noise_multiplier_for_epsilon, rounds_within
from discreet.privacy.events import fixed_size_round_event, poisson_round_event
from discreet.privacy.privacy_ledger import PrivacyLedger


def sampled(noise: float) -> DpEvent:
    return poisson_round_event(0.05, noise_multiplier=noise)


def fixed(noise: float) -> DpEvent:
    return fixed_size_round_event(50, population_size=1000, noise_multiplier=noise)


@pytest.mark.parametrize(
    ("make_event", "accountant", "target"),
    [
        (sampled, "pld", 0.3),
        (sampled, "pld", 8.0),
        (sampled, "rdp", 0.3),
        (sampled, "rdp", 8.0),
        (fixed, "rdp", 2.0),
        (LaplaceDpEvent, "pld", 2.0),
    ],
)
def test_the_noise_for_an_epsilon_is_the_smallest_to_a_ten_thousandth(
    make_event: type[DpEvent], accountant: str, target: float
) -> None:
    def epsilon(noise: float) -> float:
        return epsilon_spent([(make_event(noise), 100)], delta=1e-5, accountant=accountant)

    noise = noise_multiplier_for_epsilon(target, make_event=make_event, count=100, delta=1e-5, accountant=accountant)
    assert epsilon(noise) <= target < epsilon(noise * (1 - 1e-4))


@pytest.mark.parametrize("target", [1e-3, 0.1, 50.0])
def test_the_noise_of_a_gaussian_release_is_the_analytic_one(target: float) -> None:
    noise = noise_multiplier_for_epsilon(target, make_event=GaussianDpEvent, count=1, delta=1e-5)
    upper = norm.cdf(1 / (2 * noise) - target * noise)
    delta = upper - math.exp(target) * norm.cdf(-1 / (2 * noise) - target * noise)
    assert delta <= 1e-5
    assert delta == pytest.approx(1e-5, rel=0.01)


def test_a_target_out_of_reach_is_refused_with_what_can_be_reached() -> None:
    with pytest.raises(ValueError, match=r"target_epsilon 1e-09 is out of reach: with noise_multiplier"):
        noise_multiplier_for_epsilon(1e-9, make_event=sampled, count=100, delta=1e-12, accountant="rdp")


@pytest.mark.parametrize("make_event", [GaussianDpEvent, lambda noise: NoOpDpEvent()])
def test_a_target_that_asks_for_no_noise_is_refused(make_event: type[DpEvent]) -> None:
    with pytest.raises(ValueError, match="asks for no noise"):
        noise_multiplier_for_epsilon(1e9, make_event=make_event, count=1, delta=1e-5)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_target_out_of_range_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="target_epsilon must be finite and above 0"):
        noise_multiplier_for_epsilon(target, make_event=sampled, count=1, delta=1e-5)


@pytest.mark.parametrize("count", [0, -1, 1.0, True])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count must be a whole number of at least 1"):
        noise_multiplier_for_epsilon(1.0, make_event=sampled, count=count, delta=1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_rounds_of_a_budget_fit_and_one_more_does_not(accountant: str) -> None:
    spent = PrivacyLedger().record(GaussianDpEvent(5.0), 2)
    rounds = rounds_within(3.0, event=sampled(1.1), delta=1e-5, accountant=accountant, spent=spent)
    assert rounds > 10
    assert spent.record(sampled(1.1), rounds).epsilon(1e-5, accountant) <= 3.0
    assert spent.record(sampled(1.1), rounds + 1).epsilon(1e-5, accountant) > 3.0


def test_a_spent_budget_has_no_rounds_left() -> None:
    spent = PrivacyLedger().record(GaussianDpEvent(0.5))
    assert rounds_within(3.0, event=sampled(1.1), delta=1e-5, spent=spent) == 0
    assert rounds_within(0.0, event=sampled(1.1), delta=1e-5) == 0


def test_noise_for_a_target_leaves_exactly_the_planned_rounds() -> None:
    noise = noise_multiplier_for_epsilon(2.0, make_event=sampled, count=100, delta=1e-5)
    assert rounds_within(2.0, event=sampled(noise), delta=1e-5) == 100


def test_a_budget_for_more_rounds_than_are_looked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 10000000 rounds"):
        rounds_within(math.inf, event=sampled(1.0), delta=1e-5)


@pytest.mark.parametrize("budget", [-1.0, math.nan])
def test_a_budget_out_of_range_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="max_epsilon must be at least 0"):
        rounds_within(budget, event=sampled(1.0), delta=1e-5)


def test_a_uniform_schedule_spends_the_same_each_round() -> None:
    schedule = epsilon_schedule(2.0, kind="uniform", rounds=8)
    assert schedule == pytest.approx([0.25] * 8, rel=1e-11)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.3])
def test_a_geometric_schedule_keeps_its_ratio(ratio: float) -> None:
    schedule = epsilon_schedule(2.0, kind="geometric", rounds=6, ratio=ratio)
    assert [later / sooner for sooner, later in itertools.pairwise(schedule)] == pytest.approx([ratio] * 5)


def test_a_listed_schedule_keeps_its_shares() -> None:
    assert epsilon_schedule(8.0, kind=[1.0, 2.0, 1.0], rounds=3) == pytest.approx((2.0, 4.0, 2.0), rel=1e-11)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-6, 1e5), st.sampled_from(["uniform", "geometric"]), st.integers(1, 300), st.floats(0.7, 1.4))
def test_what_a_schedule_spends_is_its_total_and_never_more(total: float, kind: str, rounds: int, ratio: float) -> None:
    schedule = epsilon_schedule(total, kind=kind, rounds=rounds, ratio=ratio)
    spent = pure_epsilon([(LaplaceDpEvent(1 / epsilon), 1) for epsilon in schedule])
    assert len(schedule) == rounds
    assert total * (1 - 1e-11) <= spent <= total


def test_a_long_geometric_schedule_that_grows_does_not_overflow() -> None:
    schedule = epsilon_schedule(1.0, kind="geometric", rounds=5000, ratio=1.1)
    assert math.fsum(schedule) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_epsilon": 0.0}, "total_epsilon must be finite and above 0"),
        ({"total_epsilon": math.inf}, "total_epsilon must be finite and above 0"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"kind": "linear"}, "kind must be 'uniform', 'geometric' or a list"),
        ({"kind": "geometric", "ratio": -1.0}, "ratio must be finite and above 0"),
        ({"kind": "geometric", "ratio": math.nan}, "ratio must be finite and above 0"),
        ({"kind": [1.0]}, "one for each of the 3 rounds, not 1"),
        ({"kind": [1.0, 0.0, 1.0]}, "a share of the schedule must be finite and above 0"),
        ({"kind": [1.0, math.nan, 1.0]}, "a share of the schedule must be finite and above 0"),
    ],
)
def test_a_schedule_out_of_range_is_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"total_epsilon": 1.0, "kind": "uniform", "rounds": 3, **changes}
    with pytest.raises(ValueError, match=message):
        epsilon_schedule(**arguments)  # type: ignore[arg-type]
