"""`server.shrink_with_noise`: a step is as long as its signal is by estimate."""

from __future__ import annotations

import pytest
import torch

from discreet.accounting.events import poisson_round_event
from discreet.mechanisms.central_gaussian import UserPrivacy
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.server.round import RoundSettings, dp_fedavg_round
from discreet.server.server_optimizer import ServerSGD
from discreet.server.state import State, initial_state

SIZE, C, Z, COHORT = 20_000, 0.5, 2.0, 10.0
PRIVATE = UserPrivacy(Z, poisson_round_event(1.0, noise_multiplier=Z))
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
    states = rounds(SHRINKING, [], number=6)
    assert float(states[-1].velocity.square().sum()) == pytest.approx(states[-1].noise_energy, rel=0.06)
    # So the share of the step that is signal is at most sqrt(0.06).
    assert float(step(states).norm()) <= 0.25 * float(states[-1].velocity.norm())


def test_a_step_is_as_long_as_its_signal() -> None:
    strong = [TrainReply(1, torch.full((SIZE,), 1.0), below=False)] * 1000  # 1000 for an expected cohort of 10: 100 C
    states = rounds(SHRINKING, strong, number=1)
    # The noise is 14.1 long in 20,000 directions, 0.1 along the signal of 50: 2 % are ten standard deviations.
    assert float(step(states).norm()) == pytest.approx(100 * C, rel=0.02)
