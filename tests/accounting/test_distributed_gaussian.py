"""The account of several clients' discrete Gaussians, against exact Renyi divergences by direct convolution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
from numpy.typing import NDArray

from discreet.accounting.accounting import epsilon_spent, merged, pure_epsilon, rdp_curve
from discreet.accounting.calibration import noise_multiplier_for_epsilon
from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent, convolution_gap
from discreet.accounting.events import event_from_json, event_to_json, releases_in
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.privacy.secure_grid import SecureCohort, secure_sum

Event = DistributedDiscreteGaussianDpEvent
PLAIN = Event(variance=10**6, summands=7, sensitivity_squared=10**6, dimension=1000)


def discrete(variance: float, reach: int) -> NDArray[np.float64]:
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    return weights / weights.sum()


def of_sum(variance: int, summands: int) -> NDArray[np.float64]:
    """The probabilities of a sum, up to 22 standard deviations of a summand to either side: positive products added
    up, so right to a few units in the last place each, far into the tails."""
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
def test_the_bound_holds_against_the_exact_divergence_and_is_loose_by_less_than_half_a_per_cent(
    variance: int, summands: int, moved: int, order: float
) -> None:
    event = Event(variance, summands, sensitivity_squared=moved**2, dimension=1)
    bound = order / 2 / event.renyi_noise_multiplier**2
    exact = exact_divergence(variance, summands, moved, order)
    assert exact <= bound * (1 + 1e-12) <= exact * 1.005


def test_without_tau_the_bound_would_not_hold() -> None:
    """Two clients of variance 1: the exact divergence is above that of one discrete Gaussian of variance 2."""
    order = 1.25
    above = [exact_divergence(1, 2, moved, order) / (order * moved**2 / 4) - 1 for moved in (1, 2)]
    assert max(above) > 1e-9


@pytest.mark.parametrize(("variance", "summands"), [(1, 2), (1, 3), (1, 6), (2, 2)])
def test_half_of_tau_bounds_the_log_ratio_of_a_sum_to_one_discrete_gaussian(variance: int, summands: int) -> None:
    found = of_sum(variance, summands)
    ratio = float(np.abs(np.log(found / discrete(variance * summands, len(found) // 2))).max())
    assert 1e-9 < ratio <= convolution_gap(variance, summands) / 2
    assert summands > 2 or ratio > convolution_gap(variance, summands) / 6


def test_several_coordinates_that_differ_cost_what_the_sum_of_their_exact_divergences_does() -> None:
    """One step in each of four coordinates out of nine: Delta^2 = 4, and no more than four differ."""
    event = Event(1, 3, sensitivity_squared=4, dimension=9)
    bound = 2.0 / 2 / event.renyi_noise_multiplier**2
    assert 4 * exact_divergence(1, 3, 1, 2.0) <= bound <= 4.05 * exact_divergence(1, 3, 1, 2.0)
    assert event.renyi_noise_multiplier == Event(1, 3, sensitivity_squared=4, dimension=4).renyi_noise_multiplier
    assert event.renyi_noise_multiplier < Event(1, 3, sensitivity_squared=4, dimension=1).renyi_noise_multiplier


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_a_round_of_secure_aggregation_costs_what_the_continuous_gaussian_does_within_one_per_cent(
    noise: float,
) -> None:
    event = secure_sum(10_000, SecureCohort(10, 7), noise_multiplier=noise).event
    spent = epsilon_spent([(event, 30)], delta=1e-5, accountant="rdp")
    central = epsilon_spent([(GaussianDpEvent(noise), 30)], delta=1e-5, accountant="rdp")
    assert 0.99 * central < spent < 1.01 * central


def test_noise_of_all_clients_in_place_of_the_honest_survivors_would_cost_too_little() -> None:
    """The event is that of 7 of 10: with the noise of all ten its epsilon would be a fifth less."""
    sent = secure_sum(100, SecureCohort(10, 7), noise_multiplier=1.0)
    event = sent.event
    assert isinstance(event, Event)
    assert event.summands * event.variance >= sent.clip_steps**2
    assert (event.summands - 1) * event.variance < sent.clip_steps**2


def test_bit_and_answer_are_part_of_what_is_accounted() -> None:
    """z = 1, count noise 1/2 (a bit moves it by 1/2) and answers' noise 1 are one Gaussian of multiplier 1/sqrt(3)."""
    event = secure_sum(900, SecureCohort(10, 7), noise_multiplier=1.0, count_stddev=0.5, answers=(3, 1.0)).event
    spent = epsilon_spent([(event, 1)], delta=1e-5, accountant="rdp")
    wanted = epsilon_spent([(GaussianDpEvent(3**-0.5), 1)], delta=1e-5, accountant="rdp")
    assert 0.99 * wanted < spent < 1.01 * wanted
    assert event.dimension == 904


def test_it_composes_with_other_events_and_with_itself_by_adding_renyi_divergences() -> None:
    both = rdp_curve([(PLAIN, 3), (GaussianDpEvent(2.0), 2)])
    assert np.allclose(both, 3 * rdp_curve([(PLAIN, 1)]) + 2 * rdp_curve([(GaussianDpEvent(2.0), 1)]), rtol=1e-12)
    assert merged([(PLAIN, 1), (GaussianDpEvent(2.0), 1), (PLAIN, 2)]) == {PLAIN: 3, GaussianDpEvent(2.0): 1}


def test_it_has_no_pure_epsilon_and_none_by_loss_distributions_or_beside_the_replacing_of_a_member() -> None:
    other = SampledWithoutReplacementDpEvent(100, 10, GaussianDpEvent(1.0))
    for entries, accountant, message in (([PLAIN], "pld", "choose 'rdp'"), ([PLAIN, other], "rdp", "do not share")):
        with pytest.raises(ValueError, match=message):
            epsilon_spent([(event, 1) for event in entries], delta=1e-5, accountant=accountant)
    assert pure_epsilon([(PLAIN, 1)]) == math.inf


def test_the_event_survives_the_ledgers_json_under_its_own_name() -> None:
    text = event_to_json(PLAIN)
    assert '"kind":"distributed_discrete_gaussian"' in text
    assert event_from_json(text) == PLAIN
    assert releases_in(PLAIN) == 1
    assert PrivacyLedger(((PLAIN, 2), (PLAIN, 3))).entries == ((PLAIN, 5),)


def test_noise_is_found_for_a_target_and_never_costs_more() -> None:
    def event(noise: float) -> object:
        return secure_sum(5000, SecureCohort(20, 15), noise_multiplier=noise).event

    noise = noise_multiplier_for_epsilon(2.0, make_event=event, count=40, delta=1e-3, accountant="rdp")
    assert 1.99 < epsilon_spent([(event(noise), 40)], delta=1e-3, accountant="rdp") <= 2.0
    central = noise_multiplier_for_epsilon(2.0, make_event=GaussianDpEvent, count=40, delta=1e-3, accountant="rdp")
    assert noise == pytest.approx(central, rel=0.01)
