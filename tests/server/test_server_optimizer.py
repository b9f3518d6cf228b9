"""The server's optimizers are Flower's, carry their state over a resumed run, and refuse what they do not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message_type import MessageType
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedYogi
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

import discreet
from discreet.accounting.events import poisson_round_event
from discreet.mechanisms.central_gaussian import UserPrivacy
from discreet.mechanisms.mechanism import PlainSum
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.server.resuming import asked_settings
from discreet.server.round import RoundSettings, dp_fedavg_round
from discreet.server.run_folder import RunFolder
from discreet.server.server_optimizer import ServerAdam, ServerOptimizer, ServerSGD, ServerYogi, apply, server_optimizer
from discreet.server.state import State, initial_state
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

SIZE, CLIENTS, ROUNDS = 40, 3, 6
NOBODY = cast(Grid, None)
TINY = ["data.name=breast_cancer", "data.num_clients=5", "model.name=logistic_regression", "training.epochs=1"]
TINY += ["privacy.user.noise_multiplier=1", "rounds=4", "seed=60913", "privacy.noise=float"]


def reply(params: Tensor, update: Tensor) -> Message:
    """What a client of a Flower app sends: its parameters, and how many examples it has."""
    arrays = ArrayRecord([(params + update).numpy()])
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 7})})
    return Message(content=content, dst_node_id=1, message_type=MessageType.TRAIN)


def updates() -> list[list[Tensor]]:
    """Of each round, the updates of its clients: some coordinates far smaller than others, as in a model."""
    generator = torch.Generator().manual_seed(40471)
    scale = torch.logspace(-5, 0, SIZE)
    return [[scale * torch.randn(SIZE, generator=generator) for _ in range(CLIENTS)] for _ in range(ROUNDS)]


def by_flower(strategy: FedAvg) -> Tensor:
    strategy.fraction_train = 0.0
    params = torch.linspace(-1, 1, SIZE)
    for number, cohort in enumerate(updates(), 1):
        # With a fraction of 0 it makes no messages, and learns the parameters of the round.
        strategy.configure_train(number, ArrayRecord([params.numpy()]), ConfigRecord(), NOBODY)
        arrays, _ = strategy.aggregate_train(number, [reply(params, update) for update in cohort])
        assert arrays is not None
        params = torch.from_numpy(arrays.to_numpy_ndarrays()[0]).float()
    return params


def by_discreet(optimizer: ServerOptimizer) -> Tensor:
    state = initial_state(torch.linspace(-1, 1, SIZE), clip_norm=float("inf"))
    how = RoundSettings(float(CLIENTS), optimizer, PlainSum())
    for cohort in updates():
        sent = [TrainReply(1, update, below=True) for update in cohort]
        state, _ = dp_fedavg_round(state, sent, how, source=seeded_source(3), charge=lambda _: None)
    return state.params


@pytest.mark.parametrize(
    ("ours", "flowers"),
    [
        (ServerSGD(), FedAvg),
        (ServerSGD(0.5, momentum=0.9), lambda: FedAvgM(server_learning_rate=0.5, server_momentum=0.9)),
        (ServerAdam(0.3, 0.8, 0.95, 0.1), lambda: FedAdam(eta=0.3, beta_1=0.8, beta_2=0.95, tau=0.1)),
        (ServerYogi(0.3, 0.8, 0.95, 0.1), lambda: FedYogi(eta=0.3, beta_1=0.8, beta_2=0.95, tau=0.1)),
    ],
    ids=["sgd", "momentum", "adam", "yogi"],
)
def test_rounds_without_noise_and_clip_are_those_of_flowers_strategy(
    ours: ServerOptimizer, flowers: Callable[[], FedAvg], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    # Both add updates of 1 to parameters of 1 in float32, and divide by roots of their squares.
    torch.testing.assert_close(by_discreet(ours), by_flower(flowers()), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("ours", [ServerAdam(), ServerYogi()], ids=str)
def test_an_optimizer_whose_second_moment_was_lost_makes_no_step(ours: ServerOptimizer) -> None:
    with pytest.raises(ValueError, match="after 3 steps the second moment is missing"):
        apply(ours, State(3, torch.zeros(2), torch.ones(2), 1.0), torch.ones(2))


@pytest.mark.parametrize("how", ["shrink_with_noise=true", "optimizer=adam"])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(how: str, tmp_path: Path) -> None:
    words = [*TINY, f"server.{how}"]
    simulate(load_config([*words, f"output_dir={tmp_path / 'whole'}"]))
    simulate(load_config([*words, f"output_dir={tmp_path / 'parts'}", "rounds=2"]))
    simulate(asked_settings(["resume=true", f"output_dir={tmp_path / 'parts'}", "rounds=4"]))
    whole, parts = (RunFolder(tmp_path / name).load_checkpoint() for name in ("whole", "parts"))
    assert whole is not None
    assert parts is not None
    assert torch.equal(whole.params, parts.params)
    assert torch.equal(whole.second_moment, parts.second_moment)


@pytest.mark.parametrize("ours", [ServerSGD(momentum=0.9, shrink_with_noise=True), ServerAdam(), ServerYogi()], ids=str)
def test_an_optimizer_moves_the_model_by_the_noised_mean_and_nothing_else(ours: ServerOptimizer) -> None:
    # An update split among two clients in other ways gives the same sum, the same noise, and so the same model.
    user = UserPrivacy(1.0, poisson_round_event(0.5, noise_multiplier=1.0))
    how, ends = RoundSettings(4.0, ours, user), []
    for shares in ((1.0, 0.0), (0.5, 0.5), (0.25, 0.75)):
        state = initial_state(torch.zeros(2), clip_norm=8.0)
        for number in range(3):
            sent = [TrainReply(1, share * torch.tensor([4.0, 2.0]), below=True) for share in shares]
            source = seeded_source(631).child(number)
            state, _ = dp_fedavg_round(state, sent, how, source=source, charge=lambda _: None)
        ends.append(state.params)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("ours", [ServerSGD(0.5, momentum=0.9), ServerAdam(eta=0.3), ServerYogi(tau=0.1)], ids=str)
def test_a_strategy_for_any_app_steps_by_the_optimizer_that_it_is_given(ours: ServerOptimizer) -> None:
    strategy = discreet.DPFedAvg(population_size=10, target_epsilon=1.0, server_optimizer=ours)
    assert server_optimizer(strategy.config.server) == ours
