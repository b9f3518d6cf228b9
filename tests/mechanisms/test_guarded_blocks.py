"""The simulation of guarded sites: one patient's block, there either way, moves the sum by 2C, and
that is charged."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from discreet.mechanisms import guarded_blocks
from discreet.mechanisms.guarded_blocks import GuardedBlocks
from discreet.planning.state import initial_state
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TrainReply
from discreet.settings.rules import ConfigError
from discreet.settings.settings import client_settings
from tests.node.clients import config
from tests.replay import Replay, replay
from tests.rounds import round_of

C, Z = 0.5, 1.3
UNIT = torch.tensor([C, 0.0, 0.0]) * (1 - 1e-5)
OTHERS = [TrainReply(1, torch.tensor([0.1, 0.2, -0.3]), below=True)]
WORDS = (
    "privacy.user.mechanism=discreet.mechanisms.guarded_blocks:GuardedBlocks",
    f"privacy.user.clip.norm={C}",
    f"privacy.user.noise_multiplier={Z}",
    "privacy.user.target_epsilon=null",
    "privacy.user.clip.kind=fixed",
)


def made(*words: str) -> GuardedBlocks:
    return GuardedBlocks(client_settings(config(*WORDS, *words)))


def released(updates: list[TrainReply], source: RandomSource) -> object:
    start = initial_state(torch.zeros(3), clip_norm=C)
    state, released = round_of(made(), start, updates, source)
    return state, replace(released, replies=0)


def neighbours() -> Replay:
    one, other = ([*OTHERS, TrainReply(1, update, below=True)] for update in (UNIT, -UNIT))
    return replay(released, one, other)


def test_a_block_that_turns_round_moves_the_sum_by_2c_and_is_paid_for() -> None:
    found = neighbours()
    assert [fault for fault in found.faults if "sensitivity is" not in fault] == []
    assert found.gaussian_distance == pytest.approx(1 / Z, rel=0.01)


def test_noise_for_c_would_cost_twice_what_is_charged() -> None:
    with patch.object(guarded_blocks, "MOVES", 1):
        assert neighbours().gaussian_distance == pytest.approx(2 / Z, rel=0.01)


def test_a_round_costs_a_sampled_gaussian_of_the_noise_over_2c() -> None:
    drawn = made("sampling.probability=0.5")
    assert drawn.event(1) == PoissonSampledDpEvent(0.5, GaussianDpEvent(Z))
    assert drawn.sum_noise == 2 * Z


@pytest.mark.parametrize(
    "words",
    [("privacy.user.clip.kind=adaptive",), ("sampling.kind=fixed", "privacy.accountant=rdp")],
)
def test_what_a_guard_does_not_do_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="guarded blocks need"):
        made(*words).event(1)
