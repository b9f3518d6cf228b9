"""`server.shrink_with_noise`: a step is as long as its signal is by estimate."""

from __future__ import annotations

import pytest
import torch

from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.server.round import RoundSettings, dp_fedavg_round
from discreet.server.server_optimizer import ServerSGD
from discreet.server.state import State, initial_state
from tests.mechanisms.made import central

SIZE, C, Z, COHORT = 20_000, 0.5, 2.0, 10.0
PRIVATE = central(Z)
SHRINKING = RoundSettings(COHORT, ServerSGD(momentum=0.8, shrink_with_noise=True), PRIVATE)


def rounds(how: RoundSettings, updates: list[TrainReply], *, number: int) -> list[State]:
    states, source = [initial_state(torch.zeros(SIZE), clip_norm=C)], seeded_source(52387)
    for index in range(number):
        after, _ = dp_fedavg_round(states[-1], updates, how, source=source.child(index), charge=lambda _: None)
        states.append(after)
    return states


def step(states: list[State]) -> torch.Tensor:
    return states[-1].params - states[-2].params


def test_the_noise_in_the_velocity_is_what_is_expected_there() -> None:
    # Of a sum of 20,000 squares: its relative standard deviation is 0.01, and 6 of them are 1e-9.
    last = rounds(SHRINKING, [], number=6)[-1]
    assert float(last.velocity.square().sum()) == pytest.approx(last.noise_energy, rel=0.06)


def test_steps_of_noise_alone_shrink_to_a_quarter_and_less() -> None:
    # |velocity|^2 lies within 6 % of its mean but once in 1e9, so the share is at most sqrt(0.06).
    states = rounds(SHRINKING, [], number=6)
    assert float(step(states).norm()) <= 0.25 * float(states[-1].velocity.norm())


def test_a_step_is_as_long_as_its_signal() -> None:
    strong = [TrainReply(1, torch.full((SIZE,), 1.0), below=False)] * 1000  # 1000 for an expected cohort of 10: 100 C
    states = rounds(SHRINKING, strong, number=1)
    # The noise is 14.1 long in 20,000 directions, 0.1 along the signal of 50: 2 % are ten standard deviations.
    assert float(step(states).norm()) == pytest.approx(100 * C, rel=0.02)
