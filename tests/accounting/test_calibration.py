from __future__ import annotations

import math

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from discreet.accounting.accounting import epsilon_spent, pure_epsilon
from discreet.accounting.calibration import epsilon_schedule, noise_multiplier_for_epsilon, rounds_within
from discreet.accounting.events import fixed_size_round_event, poisson_round_event
from discreet.privacy.secure_grid import SecureCohort, secure_sum


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
        target, releases=lambda noise: ((make_event(noise), 100),), delta=1e-5, accountant=accountant
    )
    assert epsilon(noise) <= target < epsilon(noise * (1 - 1e-4))


@pytest.mark.parametrize(
    ("target", "event", "message"),
    [
        (1e-9, sampled, "1e-09 is out of reach: with noise_multiplier"),
        (1e9, GaussianDpEvent, "asks for no noise"),
        *((target, sampled, "target_epsilon must be finite and above 0") for target in (0.0, math.nan)),
    ],
)
def test_a_target_without_a_noise_multiplier_is_refused(target: float, event: type[DpEvent], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise_multiplier_for_epsilon(target, releases=lambda noise: ((event(noise), 100),), delta=1e-12)


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
def test_what_a_schedule_spends_is_its_total_and_never_more(total: float, kind: str, rounds: int) -> None:
    schedule = epsilon_schedule(total, kind=kind, rounds=rounds)
    spent = pure_epsilon([(LaplaceDpEvent(1 / epsilon), 1) for epsilon in schedule])
    assert len(schedule) == rounds
    assert total * (1 - 1e-11) <= spent <= total
