"""One round: what is added up, what is noised, and by how much."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dp_accounting import DpEvent
from scipy import stats

from discreet.mechanisms.sums import UnopenedSum
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.server.round import RoundSettings, dp_fedavg_round
from discreet.server.run_plan import round_settings
from discreet.server.server_optimizer import ServerSGD
from discreet.server.session import resolve
from discreet.server.state import State, initial_state
from discreet.settings.compose import load_config
from tests.mechanisms.made import central

SIZE = 20_000


def settings(
    noise_multiplier: float = 1.0, *, cohort: float = 10.0, count_stddev: float | None = 5.0, on_grid: bool = False
) -> RoundSettings:
    user = central(noise_multiplier, count_stddev, "grid" if on_grid else "float", probability=0.5)
    return RoundSettings(cohort, ServerSGD(), user)


def state(size: int, clip_norm: float) -> State:
    return initial_state(torch.zeros(size), clip_norm=clip_norm)


def run(
    before: State, updates: list[TrainReply], how: RoundSettings, *, seed: int = 71993
) -> tuple[State, list[DpEvent]]:
    charged: list[DpEvent] = []
    after, _ = dp_fedavg_round(before, updates, how, source=seeded_source(seed), charge=charged.append)
    return after, charged


def rejects(noise: np.ndarray, stddev: float) -> bool:
    """Chi-square test of a standard deviation; false-alarm rate 1e-6."""
    statistic = float(np.sum(noise**2)) / stddev**2
    tail = min(stats.chi2.sf(statistic, len(noise)), stats.chi2.cdf(statistic, len(noise)))
    return bool(tail < 5e-7)


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("replies", [0, 3])
def test_noise_has_the_standard_deviation_of_the_clip_norm_that_clipped(replies: int, on_grid: bool) -> None:
    how, clip_norm = settings(noise_multiplier=0.8, cohort=10, on_grid=on_grid), 2.5
    updates = [TrainReply(1, torch.zeros(SIZE), below=False)] * replies  # the clip norm moves for the next round
    after, _ = run(state(SIZE, clip_norm), updates, how)
    stddev = how.release.sum_noise * clip_norm / 10
    noise = after.params.double().numpy()
    assert after.clip_norm != clip_norm
    assert not rejects(noise, stddev)
    assert rejects(noise, 0.9 * stddev)
    assert rejects(noise, 1.1 * stddev)


@pytest.mark.parametrize("on_grid", [False, True])
def test_the_count_has_noise_of_its_standard_deviation(on_grid: bool) -> None:
    how, noise = settings(cohort=1000.0, count_stddev=5.0, on_grid=on_grid), []
    for seed in range(600):
        source = seeded_source(seed).child("count of norms")
        _, metrics = dp_fedavg_round(state(1, 1.0), [], how, source=source, charge=lambda _: None)
        assert metrics.fraction_below is not None
        noise.append(1000 * (metrics.fraction_below - 0.5))
    assert not rejects(np.array(noise), 5.0)
    assert rejects(np.array(noise), 0.75 * 5.0)
    assert rejects(np.array(noise), 1.25 * 5.0)


def test_the_event_is_charged_before_noise_is_drawn() -> None:
    order: list[str] = []
    source = seeded_source(5171)
    original = source.child

    def child(*labels: str | int) -> object:
        order.append("noise")
        return original(*labels)

    source.child = child  # type: ignore[method-assign,assignment]
    dp_fedavg_round(state(3, 1.0), [], settings(), source=source, charge=lambda _: order.append("charge"))
    assert order[0] == "charge"
    assert "noise" in order


def test_a_round_that_can_not_be_charged_releases_nothing() -> None:
    def full_disk(event: DpEvent) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        dp_fedavg_round(state(3, 1.0), [], settings(), source=seeded_source(3331), charge=full_disk)


def test_a_masked_sum_is_charged_before_it_is_opened() -> None:
    words = ("privacy.user.aggregation=secure", "privacy.accountant=rdp", "sampling.kind=everyone", "model.name=linear")
    plan, _ = resolve(load_config([*words, "data.num_clients=4", "privacy.user.too_noisy=warn"]))
    how, order = round_settings(plan), list[str]()
    vector = how.release.vector

    def opened() -> torch.Tensor:
        order.append("opened")
        return torch.zeros(vector.length, dtype=torch.int64)

    before = state(vector.num_params, 1.0)
    unopened = [UnopenedSum(opened, 4)]
    dp_fedavg_round(before, unopened, how, source=seeded_source(3), charge=lambda _: order.append("charged"))
    assert order == ["charged", "opened"]
