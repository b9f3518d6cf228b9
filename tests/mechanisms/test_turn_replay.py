"""Whole runs of clients that take turns, replayed on neighbouring inputs (tests/replay.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from dp_accounting import DpEvent, GaussianDpEvent
from torch import Tensor

from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.mechanisms.round_state import StateInMemory
from discreet.planning.server_optimizer import ServerSGD
from discreet.planning.state import State, initial_state
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TrainReply
from tests.mechanisms.made import turns as made
from tests.replay import Replay, replay
from tests.rounds import round_of

C, Z, GROUPS, ROUNDS, SIZE = 0.5, 1.3, 3, 8, 3
FAR = torch.tensor([1e30, -1e30, 1e30])
WILD = {
    "huge": FAR,
    "NaN": torch.full((SIZE,), math.nan),
    "small": torch.full((SIZE,), 0.01),
    "zero": torch.zeros(SIZE),
}
KINDS = [("none", 1), ("bsr", 3), ("bsr", 2), ("bisr", 4), ("sqrt", 1)]

# the updates of each client by its number, in each round in which it replies
Sent = dict[int, dict[int, Tensor]]


@dataclass
class Charges:
    """The events of a run as the ledger gets them."""

    events: list[DpEvent]

    @property
    def distance(self) -> float:
        """Of one Gaussian of noise multiplier 1 / distance, which costs as much as all of them."""
        found = [each.noise_multiplier for each in self.events if isinstance(each, GaussianDpEvent)]
        return math.sqrt(math.fsum(1 / each**2 for each in found))


def whole_run(
    how: CorrelatedNoise, charges: Charges, again: range = range(0)
) -> Callable[[Sent, RandomSource], list[object]]:
    """A run: of what clients send to what leaves, but the number of replies. Old files have it make
    the rounds `again`, from the last one that is not among them on, before it goes on."""

    def run(sent: Sent, source: RandomSource) -> list[object]:
        state, left = initial_state(torch.zeros(SIZE), clip_norm=C), list[object]()
        before, files = 0, list[tuple[State, Any]]()
        charges.events.clear()
        for number in [*range(1, again.stop), *again, *range(max(1, again.stop), ROUNDS + 1)]:
            if files[number - 1 :]:
                (state, kept), source = files[number - 1], source.child("another")
                state, before = replace(state, carried=StateInMemory(kept)), again.stop - 1
                del files[number - 1 :]
            files.append((state, state.carried.load()))
            replies = [
                TrainReply(number, update, False, client=each)
                for each, update in sent[number].items()
            ]
            state, released = round_of(
                how,
                state,
                replies,
                source.child(number),
                optimizer=ServerSGD(0.7, momentum=0.9),
                charge=charges.events.append,
                before=before,
            )
            left += [state, replace(released, replies=0)]
        return left

    return run


def runs_of(
    update: Tensor, client: int = 3, turns: tuple[int, ...] = (1, 4, 7)
) -> tuple[Sent, Sent]:
    """Neighbours: with a client that replies in these rounds, and without it."""
    other = {
        number: {(number - 1) % GROUPS: torch.full((SIZE,), 0.1)} for number in range(1, ROUNDS + 1)
    }
    both = {
        number: there | ({client: update} if number in turns else {})
        for number, there in other.items()
    }
    return both, other


def found_in(
    how: CorrelatedNoise, *neighbours: Sent, again: range = range(0)
) -> tuple[Replay, Charges]:
    charges = Charges([])
    return replay(whole_run(how, charges, again), *neighbours), charges


def release(kind: str = "bsr", bandwidth: int = 3) -> CorrelatedNoise:
    return made(Z, kind, bandwidth, groups=GROUPS, rounds=ROUNDS)


@pytest.mark.parametrize(("kind", "bandwidth"), KINDS)
@pytest.mark.parametrize("update", WILD.values(), ids=WILD)
def test_a_client_in_all_its_turns_costs_what_the_ledger_was_charged(
    kind: str, bandwidth: int, update: Tensor
) -> None:
    both, other = runs_of(update)
    for pair in ((both, other), (other, both)):
        found, charges = found_in(release(kind, bandwidth), *pair)
        assert found.faults == ()
        assert found.gaussian_distance <= charges.distance * (1 + 1e-9)
        if update is FAR:  # truncated to the grid, by less than 1 part in 1000
            assert found.gaussian_distance == pytest.approx(charges.distance, rel=2e-3)


@pytest.mark.parametrize(
    ("client", "turns"), [(4, (2, 5, 8)), (5, (3, 6)), (3, (1, 7)), (3, (4,)), (4, (5, 8))]
)
def test_other_groups_and_clients_that_miss_a_turn_cost_less(
    client: int, turns: tuple[int, ...]
) -> None:
    for kind, bandwidth in KINDS:
        found, charges = found_in(release(kind, bandwidth), *runs_of(FAR, client, turns))
        assert found.faults == ()
        assert found.gaussian_distance <= charges.distance * (1 + 1e-9)


@pytest.mark.parametrize(("kind", "bandwidth"), KINDS)
@pytest.mark.parametrize(("client", "turns"), [(4, (2, 5, 8)), (5, (3, 6)), (3, (1, 4, 7))])
@pytest.mark.parametrize("again", [range(5, 6), range(5, 7), range(2, 7)])
def test_rounds_repeated_from_old_files_cost_no_more_than_is_charged(
    again: range, client: int, turns: tuple[int, ...], kind: str, bandwidth: int
) -> None:
    found, charges = found_in(release(kind, bandwidth), *runs_of(FAR, client, turns), again=again)
    assert found.faults == ()
    assert found.gaussian_distance <= charges.distance * (1 + 1e-9)


@pytest.mark.parametrize("turns", [(1, 2), (1, 3, 4, 7), (2, 3)])
def test_a_client_out_of_its_turn_is_not_counted(turns: tuple[int, ...]) -> None:
    found, charges = found_in(release(), *runs_of(FAR, 3, turns))
    assert found.faults == ()
    assert found.gaussian_distance <= charges.distance * (1 + 1e-9)
