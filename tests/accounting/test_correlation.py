"""The matrices of correlated noise: closed forms, the sensitivity of every participation, and the
error."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, SingleEpochTreeAggregationDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.linalg import toeplitz

from discreet.accounting import correlation
from discreet.accounting.correlation import Turns, best_bandwidth, factor_and_weights
from discreet.accounting.privacy_ledger import PrivacyLedger

KINDS = [("none", 1), ("bsr", 2), ("bsr", 7), ("bisr", 3), ("bisr", 5), ("sqrt", 1)]
kinds = pytest.mark.parametrize(("kind", "bandwidth"), KINDS)


def lower(column: np.ndarray) -> np.ndarray:
    return toeplitz(column, np.zeros(len(column)))


def patterns(rounds: int, groups: int) -> Iterator[list[int]]:
    """Every choice of rounds of which no two are nearer than `groups`: turns that may be missed."""
    for size in range(rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(later - sooner >= groups for sooner, later in itertools.pairwise(chosen)):
                yield list(chosen)


def test_bands_are_the_first_coefficients_of_the_root_and_of_its_inverse() -> None:
    root, inverse = factor_and_weights("sqrt", 1, 10)
    assert root[:4].tolist() == [1, 1 / 2, 3 / 8, 5 / 16]
    assert inverse[:4] == pytest.approx([1, -1 / 2, -1 / 8, -1 / 16])
    assert factor_and_weights("bsr", 4, 10)[0].tolist() == [*root[:4], *[0.0] * 6]
    assert np.allclose(lower(root) @ lower(root), np.tril(np.ones((10, 10))))
    assert factor_and_weights("bisr", 4, 10)[1] == pytest.approx([*inverse[:4], *[0.0] * 6])


@kinds
def test_the_weights_are_the_inverse_of_the_factor(kind: str, bandwidth: int) -> None:
    factor, weights = factor_and_weights(kind, bandwidth, 30)
    assert np.allclose(lower(factor) @ lower(weights), np.eye(30), atol=1e-12)


@pytest.mark.parametrize("factor", [[1.0, 0.5, 0.6], [1.0, -0.1, -0.2]])
def test_noise_whose_coefficients_rise_or_are_negative_is_refused(
    factor: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No kind that there is has such a factor: that of bisr is the inverse of its weights.
    monkeypatch.setattr(correlation, "_inverse", lambda _: np.array(factor))
    with pytest.raises(ValueError, match="bisr noise with bandwidth 2 "):
        correlation.factor_and_weights.__wrapped__("bisr", 2, 3)


@pytest.mark.parametrize("rounds", [1, 2, 50, 400])
@pytest.mark.parametrize("kind", ["bsr", "bisr"])
def test_coefficients_never_rise_nor_fall_below_0_and_weights_fit_the_grid(
    kind: str, rounds: int
) -> None:
    for bandwidth in {*range(1, 41), rounds}:
        factor, weights = factor_and_weights(kind, bandwidth, rounds)
        assert factor.min() >= -1e-12
        assert (np.diff(factor) <= 1e-12).all()
        assert abs(weights).max() <= 1
        assert abs(weights).sum() < 4


@kinds
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_no_participation_moves_any_first_rounds_by_more_than_their_sensitivity(
    kind: str, bandwidth: int, groups: int
) -> None:
    rounds = 9 if groups == 1 else 11
    factor = lower(factor_and_weights(kind, bandwidth, rounds)[0])
    for first in range(1, rounds + 1):
        found = max(
            np.linalg.norm(factor[:first, :first][:, pattern].sum(1))
            for pattern in patterns(first, groups)
        )
        wanted = Turns(kind, bandwidth, groups, first).sensitivity
        assert wanted == pytest.approx(found, rel=1e-11)
        assert wanted >= found
        assert wanted == pytest.approx(
            math.hypot(*Turns(kind, bandwidth, groups, rounds).moves()[:first])
        )


@kinds
@pytest.mark.parametrize("groups", [1, 3])
def test_the_error_is_the_noise_on_running_sums_for_the_dearest_participation(
    kind: str, bandwidth: int, groups: int
) -> None:
    rounds, turns = 10, Turns(kind, bandwidth, groups, 10)
    factor = lower(factor_and_weights(kind, bandwidth, rounds)[0])
    on_sums = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(factor)
    dearest = max(np.linalg.norm(factor[:, pattern].sum(1)) for pattern in patterns(rounds, groups))
    assert turns.error == pytest.approx(dearest * math.sqrt((on_sums**2).sum(1).mean()))


@pytest.mark.parametrize(("groups", "turns", "most"), [(28, 4, 0.35), (5, 20, 0.54)])
def test_at_equal_epsilon_the_running_sum_has_so_much_less_noise(
    groups: int, turns: int, most: float
) -> None:
    assert -(-100 // groups) == turns
    errors = {
        kind: Turns(kind, best_bandwidth(kind, groups=groups, rounds=100), groups, 100).error
        for kind in ("bsr", "bisr", "sqrt", "none")
    }
    assert errors["bsr"] <= most * errors["none"]
    assert errors["bsr"] == min(errors.values())


@pytest.mark.parametrize(("noise_multiplier", "published"), [(1.13, 19.74), (8.83, 2.04)])
def test_tree_aggregation_is_one_gaussian_as_published(
    noise_multiplier: float, published: float
) -> None:
    """Kairouz et al. 2021 (arXiv 2103.00039), Stack Overflow: 1600 rounds, each client in one,
    delta 1e-6. Published epsilons are by an older conversion, and larger."""
    rounds, nodes = 1600, np.zeros(1600)
    for size in (2**level for level in range(11)):
        nodes[: rounds - rounds % size] += (
            1  # a round is in one node of each size, if that node is full
        )
    spent = PrivacyLedger().record(GaussianDpEvent(noise_multiplier / math.sqrt(nodes.max())))
    tree = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    tree.compose(SingleEpochTreeAggregationDpEvent(noise_multiplier, rounds))
    assert spent.epsilon(1e-6, "rdp") == pytest.approx(tree.get_epsilon(1e-6), rel=1e-9)
    assert 0.8 * published < spent.epsilon(1e-6, "pld") < spent.epsilon(1e-6, "rdp") < published


def largest_tree_move(rounds: int, turns: int, apart: int) -> int:
    """The most by which the nodes of complete binary trees over the rounds move, as a sum of
    squares, with a client of so many turns that are `apart` by more than 256 rounds: a choice for
    each round, to take a turn or not."""
    # so that only nodes of levels 9 and 10 hold two turns, and their halves tell which
    assert apart > 256

    def shared(first: int, last: int, levels: range) -> int:
        return sum(
            first >> each == last >> each and ((last >> each) + 1) << each <= rounds
            for each in levels
        )

    # from a round on, after turns in these halves
    most: dict[tuple[int, int, tuple[int, ...]], int] = defaultdict(int)
    for at, left, size in itertools.product(reversed(range(rounds)), range(1, turns + 1), range(4)):
        alone = shared(at, at, range(11))
        for halves in itertools.combinations_with_replacement(range(at // 512 + 1), size):
            pairs = sum(shared(512 * half, at, range(9, 11)) for half in halves)
            later = most[at + apart, left - 1, (*halves, at // 512)[-3:]]
            most[at, left, halves] = max(alone + 2 * pairs + later, most[at + 1, left, halves])
    return most[0, turns, ()]


def test_tree_aggregation_of_gboards_spanish_model_has_its_published_epsilon() -> None:
    """2000 rounds, noise 7, at most 6 turns of which two have 313 rounds between them: zCDP 0.81,
    (8.90, 1e-10).

    Source: McMahan and Thakurta 2022, Federated Learning with Formal Differential Privacy
    Guarantees, its notebook."""
    moved = largest_tree_move(2000, 6, 314)
    assert moved / (2 * 7.0**2) == pytest.approx(0.81, abs=0.005)
    spent = PrivacyLedger().record(GaussianDpEvent(7.0 / math.sqrt(moved)))
    assert spent.epsilon(1e-10, "rdp") == pytest.approx(8.8986, abs=5e-5)
    assert 8.0 < spent.epsilon(1e-10, "pld") < 8.8986
