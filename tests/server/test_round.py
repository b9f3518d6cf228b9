"""One round: who is asked, what is added up, what is noised and by how much, and the step of the
server's optimizer."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from dp_accounting import DpEvent
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi
from scipy import stats
from torch import Tensor

import discreet
from discreet.accounting.events import event_to_json
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.central_gaussian import CentralGaussian
from discreet.mechanisms.round_state import Released
from discreet.mechanisms.sums import UnopenedSum
from discreet.mechanisms.unprotected import Unprotected
from discreet.planning.server_optimizer import (
    ServerAdam,
    ServerOptimizer,
    ServerSGD,
    ServerYogi,
    server_optimizer,
)
from discreet.planning.state import State, initial_state
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.privacy.sampling import CohortSampling
from discreet.protocol.messages import TrainReply, request_items, request_of
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder
from discreet.server.resolve import resolve
from discreet.server.round import RunLedger, request_after, stepped
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.mechanisms.made import central, run_of
from tests.rounds import round_of

SIZE = 20_000


def settings(
    noise_multiplier: float = 1.0,
    *,
    cohort: int = 10,
    count_stddev: float | None = 5.0,
    on_grid: bool = False,
) -> CentralGaussian:
    noise = "grid" if on_grid else "float"
    return central(
        noise_multiplier, count_stddev, noise, probability=0.5, population_size=2 * cohort
    )


def state(size: int, clip_norm: float) -> State:
    return initial_state(torch.zeros(size), clip_norm=clip_norm)


def run(
    before: State, updates: list[TrainReply], how: CentralGaussian, *, seed: int = 71993
) -> tuple[State, list[DpEvent]]:
    charged: list[DpEvent] = []
    after, _ = round_of(how, before, updates, seeded_source(seed), charge=charged.append)
    return after, charged


def rejects(noise: np.ndarray, stddev: float) -> bool:
    """Chi-square test of a standard deviation; false-alarm rate 1e-6."""
    statistic = float(np.sum(noise**2)) / stddev**2
    tail = min(stats.chi2.sf(statistic, len(noise)), stats.chi2.cdf(statistic, len(noise)))
    return bool(tail < 5e-7)


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("replies", [0, 3])
def test_noise_has_the_standard_deviation_of_the_clip_norm_that_clipped(
    replies: int, on_grid: bool
) -> None:
    how, clip_norm = settings(noise_multiplier=0.8, cohort=10, on_grid=on_grid), 2.5
    updates = [
        TrainReply(1, torch.zeros(SIZE), below=False)
    ] * replies  # the clip norm moves for the next round
    after, _ = run(state(SIZE, clip_norm), updates, how)
    stddev = how.expected_noise(clip_norm).multiplier * clip_norm / 10
    noise = after.params.double().numpy()
    assert after.clip_norm != clip_norm
    assert not rejects(noise, stddev)
    assert rejects(noise, 0.9 * stddev)
    assert rejects(noise, 1.1 * stddev)


@pytest.mark.parametrize("on_grid", [False, True])
def test_the_count_has_noise_of_its_standard_deviation(on_grid: bool) -> None:
    how, noise = settings(cohort=400, count_stddev=5.0, on_grid=on_grid), []
    for seed in range(600):
        source = seeded_source(seed).child("count of norms")
        _, metrics = round_of(how, state(1, 1.0), [], source)
        noise.append(400 * (metrics.fraction_below - 0.5))
    assert not rejects(np.array(noise), 5.0)
    assert rejects(np.array(noise), 0.75 * 5.0)
    assert rejects(np.array(noise), 1.25 * 5.0)


def test_a_round_that_can_not_be_charged_releases_nothing_and_draws_no_noise() -> None:
    def full_disk(event: DpEvent) -> None:
        raise OSError("no space left")

    untouched = cast(RandomSource, object())  # any draw, or child of it, would be an AttributeError
    with pytest.raises(OSError, match="no space"):
        round_of(settings(), state(3, 1.0), [], untouched, charge=full_disk)


@pytest.mark.parametrize("norm", [math.nan, -1.0, 0.0, 1e30])
def test_a_clip_norm_that_no_client_accepts_ends_the_run_in_its_round(norm: float) -> None:
    plan, _ = resolve(load_config(["model.name=linear", "privacy.user.too_noisy=warn"]))
    before = state(plan.num_params, 1.0)
    assert stepped(before, plan, Released(before.params, math.inf, None, 0)).clip_norm == math.inf
    with pytest.raises(ConfigError, match="CentralGaussian gives"):
        stepped(before, plan, Released(before.params, norm, None, 0))


@pytest.mark.parametrize("norm", [2, np.float32(2), torch.tensor(2.0)])
def test_a_clip_norm_of_another_type_reaches_clients_as_a_number(norm: Any) -> None:
    plan, _ = resolve(load_config(["model.name=linear", "privacy.user.too_noisy=warn"]))
    before = state(plan.num_params, 1.0)
    after = stepped(before, plan, Released(before.params, norm, None, 0))
    assert request_of(request_items(request_after(after, plan))).clip_norm == 2.0


def test_each_round_is_charged_the_event_of_its_own_number(tmp_path: Path) -> None:
    words = ("sampling.kind=cyclic", "sampling.groups=2", "privacy.user.correlation.kind=sqrt")
    sizes = ("rounds=6", "data.num_clients=20", "model.name=linear", "privacy.user.too_noisy=warn")
    plan, _ = resolve(load_config([*words, *sizes, "privacy.user.clip.kind=fixed"]))
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    charges = RunLedger.of(ledger, plan, replace(state(plan.num_params, 1.0), round=2))
    for number in range(3, 7):
        charges.charge(number)
    charged = {row.round: row.event for row in ledger.releases()}
    own = {number: event_to_json(plan.mechanism.event(number)) for number in range(3, 7)}
    assert charged == own
    assert len({*own.values()}) > 1


def test_a_masked_sum_is_charged_before_it_is_opened() -> None:
    words = (
        "privacy.user.aggregation=secure",
        "privacy.accountant=rdp",
        "sampling.kind=everyone",
        "model.name=linear",
    )
    plan, _ = resolve(load_config([*words, "data.num_clients=4", "privacy.user.too_noisy=warn"]))
    order, vector = list[str](), plan.mechanism.participation.vector
    assert vector is not None

    def opened() -> torch.Tensor:
        order.append("opened")
        return torch.zeros(vector.length, dtype=torch.int64)

    before = state(vector.num_params, 1.0)
    unopened = [UnopenedSum(opened, 4)]
    round_of(
        plan.mechanism, before, unopened, seeded_source(3), charge=lambda _: order.append("charged")
    )
    assert order == ["charged", "opened"]


C, Z = 0.5, 2.0
PRIVATE = central(Z, population_size=10)
SHRINKING = ServerSGD(momentum=0.8, shrink_with_noise=True)


def rounds(how: ServerOptimizer, updates: list[TrainReply], *, number: int) -> list[State]:
    states, source = [initial_state(torch.zeros(SIZE), clip_norm=C)], seeded_source(52387)
    for index in range(number):
        after, _ = round_of(PRIVATE, states[-1], updates, source.child(index), optimizer=how)
        states.append(after)
    return states


def step(states: list[State]) -> torch.Tensor:
    return states[-1].params - states[-2].params


def test_the_noise_in_the_velocity_is_what_is_expected_there() -> None:
    # Of a sum of 20,000 squares: its relative standard deviation is 0.01, and 6 of them are 1e-9.
    states = rounds(SHRINKING, [], number=6)
    assert float(states[-1].velocity.square().sum()) == pytest.approx(
        states[-1].noise_energy, rel=0.06
    )
    # So the share of the step that is signal is at most sqrt(0.06).
    assert float(step(states).norm()) <= 0.25 * float(states[-1].velocity.norm())


def test_a_step_is_as_long_as_its_signal() -> None:
    strong = [
        TrainReply(1, torch.full((SIZE,), 1.0), below=False)
    ] * 1000  # 1000 for an expected cohort of 10: 100 C
    states = rounds(SHRINKING, strong, number=1)
    # The noise is 14.1 long in 20,000 directions, 0.1 along the signal of 50: 2 % are ten standard
    # deviations.
    assert float(step(states).norm()) == pytest.approx(100 * C, rel=0.02)


NUMBERS, CLIENTS, ROUNDS = 40, 3, 6
NOBODY = cast(Grid, None)
TINY = [
    "data.name=breast_cancer",
    "data.num_clients=5",
    "model.name=logistic_regression",
    "training.epochs=1",
]
TINY += ["privacy.user.noise_multiplier=1", "rounds=4", "seed=60913", "privacy.noise=float"]


def reply(params: Tensor, update: Tensor) -> Message:
    """What a client of a Flower app sends: its parameters, and how many examples it has."""
    arrays = ArrayRecord([(params + update).numpy()])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 7})})
    return Message(content=content, dst_node_id=1, message_type=MessageType.TRAIN)


def updates() -> list[list[Tensor]]:
    """Of each round, the updates of its clients: some coordinates far smaller than others, as in a
    model."""
    generator = torch.Generator().manual_seed(40471)
    scale = torch.logspace(-5, 0, NUMBERS)
    return [
        [scale * torch.randn(NUMBERS, generator=generator) for _ in range(CLIENTS)]
        for _ in range(ROUNDS)
    ]


def by_flower(strategy: FedAvg) -> Tensor:
    strategy.fraction_train = 0.0
    params = torch.linspace(-1, 1, NUMBERS)
    for number, cohort in enumerate(updates(), 1):
        # With a fraction of 0 it makes no messages, and learns the parameters of the round.
        strategy.configure_train(number, ArrayRecord([params.numpy()]), ConfigRecord(), NOBODY)
        arrays, _ = strategy.aggregate_train(number, [reply(params, update) for update in cohort])
        params = torch.from_numpy(arrays.to_numpy_ndarrays()[0]).float()
    return params


def by_discreet(optimizer: ServerOptimizer) -> Tensor:
    state = initial_state(torch.linspace(-1, 1, NUMBERS), clip_norm=float("inf"))
    run = run_of(0.0, population_size=CLIENTS)
    for cohort in updates():
        sent = [TrainReply(1, update, below=True) for update in cohort]
        state, _ = round_of(Unprotected(run), state, sent, seeded_source(3), optimizer=optimizer)
    return state.params


@pytest.mark.parametrize(
    ("ours", "flowers"),
    [
        (ServerSGD(), FedAvg),
        (
            ServerSGD(0.5, momentum=0.9),
            lambda: FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
        ),
        (
            ServerAdam(0.3, 0.8, 0.95, 0.1),
            lambda: FedAdam(eta=0.3, beta_1=0.8, beta_2=0.95, tau=0.1),
        ),
        (
            ServerYogi(0.3, 0.8, 0.95, 0.1),
            lambda: FedYogi(eta=0.3, beta_1=0.8, beta_2=0.95, tau=0.1),
        ),
    ],
    ids=["sgd", "momentum", "adam", "yogi"],
)
def test_rounds_without_noise_and_clip_are_those_of_flowers_strategy(
    ours: ServerOptimizer, flowers: Callable[[], FedAvg]
) -> None:
    # Both add updates of 1 to parameters of 1 in float32, and divide by roots of their squares.
    torch.testing.assert_close(by_discreet(ours), by_flower(flowers()), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("how", ["shrink_with_noise=true", "optimizer=adam"])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(how: str, tmp_path: Path) -> None:
    words = [*TINY, f"server.{how}"]
    simulate(*load_asked([*words, f"output_dir={tmp_path / 'whole'}"]))
    simulate(*load_asked([*words, f"output_dir={tmp_path / 'parts'}", "rounds=2"]))
    simulate(*asked_settings(["resume=true", f"output_dir={tmp_path / 'parts'}", "rounds=4"]))
    whole, parts = (RunFolder(tmp_path / name).load_checkpoint() for name in ("whole", "parts"))
    assert torch.equal(whole.params, parts.params)
    assert torch.equal(whole.second_moment, parts.second_moment)


@pytest.mark.parametrize(
    "ours", [ServerSGD(momentum=0.9, shrink_with_noise=True), ServerAdam(), ServerYogi()], ids=str
)
def test_an_optimizer_moves_the_model_by_the_noised_mean_and_nothing_else(
    ours: ServerOptimizer,
) -> None:
    # An update split among two clients in other ways gives the same sum, the same noise, and so the
    # same model.
    user, ends = central(1.0, probability=0.5, population_size=8), []
    for shares in ((1.0, 0.0), (0.5, 0.5), (0.25, 0.75)):
        state = initial_state(torch.zeros(2), clip_norm=8.0)
        for number in range(3):
            sent = [TrainReply(1, share * torch.tensor([4.0, 2.0]), below=True) for share in shares]
            source = seeded_source(631).child(number)
            state, _ = round_of(user, state, sent, source, optimizer=ours)
        ends.append(state.params)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize(
    "ours", [ServerSGD(0.5, momentum=0.9), ServerAdam(eta=0.3), ServerYogi(tau=0.1)], ids=str
)
def test_a_strategy_for_any_app_steps_by_the_optimizer_that_it_is_given(
    ours: ServerOptimizer,
) -> None:
    strategy = discreet.DPFedAvg(population_size=10, target_epsilon=1.0, server_optimizer=ours)
    assert server_optimizer(strategy.config.server) == ours


DRAWS, ALARM = 3000, 1e-9  # from a seed fixed beforehand; the false-alarm rate over its choice


def p_value(sampling: CohortSampling, members: range, chances: list[float]) -> float:
    """Chi-square test of the cohorts' sizes, which have these chances."""
    source = seeded_source(73009)
    sizes = Counter(len(sampling.draw(members, source)) for _ in range(DRAWS))
    assert max(sizes) < len(chances)
    seen = [sizes[size] for size in range(len(chances))]
    return float(stats.chisquare(seen, [DRAWS * chance for chance in chances]).pvalue)


def test_a_poisson_cohort_is_empty_as_often_as_it_should_be() -> None:
    sampling, chances = CohortSampling("poisson", 0.3, 3), [0.343, 0.441, 0.189, 0.027]
    assert p_value(sampling, range(3), chances) > ALARM
    not_empty = [1e-9, *(chance / (1 - 0.343) for chance in chances[1:])]
    assert p_value(sampling, range(3), not_empty) < ALARM


def test_a_fixed_size_cohort_is_drawn_from_the_population_not_from_who_is_connected() -> None:
    sampling = CohortSampling("fixed", 0.5, 4)
    assert p_value(sampling, range(2), [1 / 6, 4 / 6, 1 / 6]) > ALARM
    assert p_value(sampling, range(2), [1 / 4, 2 / 4, 1 / 4]) < ALARM
    assert {len(sampling.draw(range(4), seeded_source(seed))) for seed in range(9)} == {2}


def test_drawing_a_cohort_of_a_million_takes_the_memory_of_the_cohort() -> None:
    tracemalloc.start()
    cohort = CohortSampling("poisson", 1e-4, 10**6).draw(range(10**6), seeded_source(33091))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 20 < len(cohort) < 200
    assert peak < 2_000_000
