from __future__ import annotations

import math
from typing import Any

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, NoOpDpEvent
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
    return secure_sum(5000, SecureCohort(20, 15), noise_multiplier=noise).event


@pytest.mark.parametrize(
    ("make_event", "accountant", "target"),
    [
        (sampled, "pld", 0.3),
        (sampled, "pld", 8.0),
        (sampled, "rdp", 0.3),
        (sampled, "rdp", 8.0),
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

    noise = noise_multiplier_for_epsilon(target, make_event=make_event, count=100, delta=1e-5, accountant=accountant)
    assert epsilon(noise) <= target < epsilon(noise * (1 - 1e-4))


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        (1e-9, {"count": 100, "delta": 1e-12, "accountant": "rdp"}, "1e-09 is out of reach: with noise_multiplier"),
        (1e9, {"make_event": GaussianDpEvent}, "asks for no noise"),
        (1e9, {"make_event": lambda noise: NoOpDpEvent()}, "asks for no noise"),
        *((target, {}, "target_epsilon must be finite and above 0") for target in (0.0, math.inf, math.nan)),
        *((1.0, {"count": count}, "count must be a whole number of at least 1") for count in (0, 1.0)),
    ],
)
def test_a_target_without_a_noise_multiplier_is_refused(target: float, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise_multiplier_for_epsilon(target, **{"make_event": sampled, "count": 1, "delta": 1e-5, **changes})


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_rounds_of_a_budget_fit_and_one_more_does_not(accountant: str) -> None:
    rounds = rounds_within(3.0, event=sampled(1.1), delta=1e-5, accountant=accountant)
    costs = [epsilon_spent([(sampled(1.1), rounds + more)], delta=1e-5, accountant=accountant) for more in (0, 1)]
    assert rounds > 10
    assert costs[0] <= 3.0 < costs[1]
    assert rounds_within(0.0, event=sampled(1.1), delta=1e-5, accountant=accountant) == 0


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 1e5), st.sampled_from(["uniform", "geometric"]), st.integers(1, 300))
def test_what_a_schedule_spends_is_its_total_and_never_more(total: float, kind: str, rounds: int) -> None:
    schedule = epsilon_schedule(total, kind=kind, rounds=rounds)
    spent = pure_epsilon([(LaplaceDpEvent(1 / epsilon), 1) for epsilon in schedule])
    assert len(schedule) == rounds
    assert total * (1 - 1e-11) <= spent <= total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_epsilon": 0.0}, "total_epsilon must be finite and above 0"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"kind": "linear"}, "kind must be 'uniform', 'geometric' or a list"),
        ({"kind": [1.0]}, "one for each of the 3 rounds, not 1"),
        ({"kind": [1.0, 0.0, 1.0]}, "a share of the schedule must be finite and above 0"),
    ],
)
def test_a_schedule_out_of_range_is_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"total_epsilon": 1.0, "kind": "uniform", "rounds": 3, **changes}
    with pytest.raises(ValueError, match=message):
        epsilon_schedule(**arguments)  # type: ignore[arg-type]
