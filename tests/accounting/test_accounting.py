from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

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
)
from scipy.stats import norm

from discreet.accounting.accounting import PRIMIHUB_ORDERS, epsilon_spent, pure_epsilon, rdp_epsilon
from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.accounting.events import ACCOUNTANTS, fixed_size_round_event

TABLE = Path(__file__).parents[1] / "reference" / "published_epsilons.csv"
PUBLISHED = [*csv.DictReader(TABLE.read_text().splitlines())]
BOTH = pytest.mark.parametrize("accountant", list(ACCOUNTANTS))
ROUND = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.5))
MASKED = DistributedDiscreteGaussianDpEvent(variance=10**6, summands=7, sensitivity_squared=10**6, dimension=1000)


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Balle and Wang 2018, Theorem 8: the delta of a Gaussian release with that noise over sensitivity."""
    upper = norm.cdf(1 / (2 * noise) - epsilon * noise)
    return float(upper - math.exp(epsilon) * norm.cdf(-1 / (2 * noise) - epsilon * noise))


def entries_of(row: dict[str, str]) -> list[tuple[DpEvent, int]]:
    return [(PoissonSampledDpEvent(float(row["q"]), GaussianDpEvent(float(row["sigma"]))), int(row["T"]))]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["name"])
@pytest.mark.parametrize(("accountant", "column"), [("pld", "pld"), ("rdp", "rdp_improved")])
def test_published_settings_cost_what_the_table_says(row: dict[str, str], accountant: str, column: str) -> None:
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
    assert epsilon_spent([(ours, 100)], delta=1e-5, accountant="rdp") == pytest.approx(14.09, abs=6e-3)
    assert epsilon_spent([(uncorrected, 100)], delta=1e-5, accountant="rdp") == pytest.approx(3.56, abs=6e-3)


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
def test_a_fixed_cohort_without_the_correction_costs_too_little(noise: float) -> None:
    ours = fixed_size_round_event(50, population_size=50, noise_multiplier=noise)
    uncorrected = SampledWithoutReplacementDpEvent(50, 50, GaussianDpEvent(noise))
    epsilon, too_little = (epsilon_spent([(event, 1)], delta=1e-5, accountant="rdp") for event in (ours, uncorrected))
    assert gaussian_delta(epsilon, noise / 2) <= 1e-5  # noise over the sensitivity 2C
    assert gaussian_delta(too_little, noise / 2) > 1e-4


@BOTH
def test_neither_merging_nor_order_nor_nesting_changes_epsilon(accountant: str) -> None:
    other = GaussianDpEvent(4.0) if accountant == "pld" else MASKED
    nested = ComposedDpEvent([SelfComposedDpEvent(ROUND, 2), other, SelfComposedDpEvent(NoOpDpEvent(), 5)])
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
NO_NOISE = [NonPrivateDpEvent(), LaplaceDpEvent(0.0), PoissonSampledDpEvent(0.1, GaussianDpEvent(0.0)), WITHOUT_NOISE]


@BOTH
def test_what_releases_nothing_costs_nothing_and_what_has_no_noise_costs_everything(accountant: str) -> None:
    for entries in ([], [(ROUND, 0), (NonPrivateDpEvent(), 0)], [(event, 3) for event in NOTHING]):
        assert epsilon_spent(entries, delta=1e-5, accountant=accountant) == 0.0
    for event in NO_NOISE:
        assert epsilon_spent([(event, 1), (ROUND, 1)], delta=1e-5, accountant=accountant) == math.inf
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
        *((ROUND, {"delta": delta}, "delta must be between 0 and 1") for delta in (0.0, 1.0, math.nan)),
        (ROUND, {"accountant": "moments"}, "pld, rdp"),
        *((ROUND, {"count": count}, "count must be a whole number of at least 0") for count in (-1, 2.0)),
        (PoissonSampledDpEvent(0.1, ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(2.0)])), {}, UNKNOWN),
        (GaussianDpEvent(math.nan), {}, "must be"),
        (PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)), {}, "must be"),
        (SampledWithoutReplacementDpEvent(10, 11, GaussianDpEvent(1.0)), {}, "does not exist"),
        (FIXED, {}, "choose 'rdp'"),
        (MASKED, {}, "choose 'rdp'"),
        (ComposedDpEvent([MASKED, FIXED]), {"accountant": "rdp"}, "do not share"),
        (PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)), {"accountant": "rdp"}, "choose 'pld'"),
    ],
)
def test_what_has_no_epsilon_is_refused_with_the_reason(event: DpEvent, given: dict[str, Any], message: str) -> None:
    how = {"count": 1, "delta": 1e-5, **given}
    with pytest.raises(ValueError, match=message):
        epsilon_spent([(event, how.pop("count"))], **how)


@BOTH
@pytest.mark.parametrize("noise", [1e-300, 1e-6, 1e300])
@pytest.mark.parametrize("probability", [5e-324, 0.5, 1 - 2**-53])
def test_extreme_parameters_are_answered(accountant: str, noise: float, probability: float) -> None:
    event = PoissonSampledDpEvent(probability, GaussianDpEvent(noise))
    assert epsilon_spent([(event, 10)], delta=1e-5, accountant=accountant) >= 0
