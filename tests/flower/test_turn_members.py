"""Nodes whose numbers change amid a run whose clients take turns: they take no part in the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

import discreet
from discreet import FixedClipping
from discreet.accounting.events import BSR, NONE
from discreet.flower.grid_transport import GridTransport
from discreet.flower.serving import own_messages
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.planning.plan import Plan
from discreet.privacy.randomness import RandomSource
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.run_members import RunMembers
from tests.flower.flower_apps import (
    START,
    Answer,
    FakeGrid,
    arrays,
    changed_by,
    strategy,
    values_of,
)
from tests.flower.masked_grid import TINY, Nodes, ServerKilled, federated, nodes
from tests.replay import replay

C, Z, GROUPS, ROUNDS = 0.5, 1.3, 3, 8
STILL, FAR = changed_by(0.0), changed_by(1e30)
# one client each, in the groups 0, 1 and 2
OTHERS: dict[int, Answer] = {6: changed_by(0.01), 7: changed_by(-3.0), 8: changed_by(0.2)}
CLIENT = 3
# the number that the client's node has from so many rounds on
MOVES = {
    "it stays": {},
    "once": {1: 4},
    "late": {4: 4},
    "a number each time": {1: 4, 2: 5},
    "into its own group": {1: 9},
}


@dataclass
class Renumbered(FakeGrid):
    """Nodes of a real federation, one of whose number changes after rounds."""

    moves: dict[int, int] = field(default_factory=dict)
    number: int = CLIENT

    def get_node_ids(self) -> Iterable[int]:
        rounds = [int(each.metadata.group_id) for each in self.sent.values()]
        number = self.moves.get(max(rounds, default=0), self.number)
        self.answers[number] = self.answers.pop(self.number)
        self.number = number
        return super().get_node_ids()

    def asked_of(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """The rounds in which nodes with these numbers were asked, and the node."""
        return [
            (int(each.metadata.group_id), each.metadata.dst_node_id)
            for each in self.sent.values()
            if each.metadata.dst_node_id in set(numbers)
        ]


def killed_before(number: int, grid: FakeGrid) -> Grid:
    """The grid of a server that is killed before it asks in a round."""
    push = grid.push_messages

    def push_or_die(messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        if sent[0].metadata.group_id == str(number):
            raise ServerKilled
        return push(sent)

    grid.push_messages = push_or_die  # type: ignore[method-assign]
    return cast(Grid, grid)


def start(folder: Path, grid: object, *, resume: bool = False, timeout: float = 2.0) -> None:
    """A run of six rounds, or the rest of it."""
    made = taking_turns(folder, resume=resume)
    made.start(cast(Grid, grid), arrays(), num_rounds=6, timeout=timeout)


def begun(folder: Path, grid: FakeGrid, *, rounds: int) -> None:
    """A run whose server is killed after so many rounds."""
    with pytest.raises(ServerKilled):
        start(folder, killed_before(rounds + 1, grid))


def taking_turns(folder: Path, **more: Any) -> discreet.DPFedAvg:
    mechanism = discreet.CorrelatedNoise(
        noise_multiplier=Z,
        delta=1e-3,
        clipping=FixedClipping(C),
        groups=GROUPS,
        correlation=more.pop("kind", BSR),
        too_noisy="warn",
    )
    return strategy(folder, **{"sampling": "cyclic", "mechanism": mechanism, "seed": None, **more})


def charged_in(folder: Path) -> float:
    """The distance of one Gaussian that costs as much as all that the ledger was charged."""
    entries = DurableLedger(folder / "ledger.db").spent("user").entries
    noises = [
        (event.noise_multiplier, count)
        for event, count in entries
        if hasattr(event, "noise_multiplier")
    ]
    return math.sqrt(math.fsum(count / noise**2 for noise, count in noises))


def whole_run(
    moves: dict[int, int], kind: str, charged: list[float]
) -> Callable[[Answer, RandomSource], list[object]]:
    """A run through the real transport: of what one client answers to what leaves."""

    def released(answer: Answer, source: RandomSource) -> list[object]:
        grid = Renumbered({CLIENT: answer, **OTHERS}, moves=moves)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            seed = int(1e6 * float(source.uniform(1)))
            made = taking_turns(path, kind=kind, seed=seed)
            result = made.start(cast(Grid, grid), arrays(), num_rounds=ROUNDS, timeout=2.0)
            charged.append(charged_in(path))
        return [torch.from_numpy(values_of(result)[name].copy()) for name in START]

    return released


@pytest.mark.parametrize("kind", [BSR, NONE])
@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_a_client_whose_number_changes_amid_a_run_costs_what_the_ledger_was_charged(
    moves: dict[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("discreet.flower.strategy.forbid_seed", lambda seed: None)
    charged = list[float]()
    found = replay(whole_run(moves, kind, charged), FAR, STILL)
    assert found.faults == ()
    assert found.gaussian_distance <= charged[-1] * (1 + 1e-9)
    if not moves:  # truncated to the grid, by less than 1 part in 1000
        assert found.gaussian_distance == pytest.approx(charged[-1], rel=2e-3)


def test_a_node_with_a_new_number_is_not_asked_and_the_log_names_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Renumbered({CLIENT: STILL, **OTHERS}, moves={1: 4})
    start(tmp_path / "run", grid)
    assert grid.asked_of([CLIENT, 4]) == [(1, CLIENT)]
    assert grid.asked_of([7]) == [(2, 7), (5, 7)]
    said = [text for text in caplog.messages if "[4] have numbers that are new" in text]
    assert len(said) == 1
    assert "the key that it had" in said[0]
    assert "(if both charge one account, it adds them up)" in said[0]
    assert "4 nodes take turns" in caplog.text


def test_a_run_that_goes_on_asks_the_nodes_that_it_began_with(tmp_path: Path) -> None:
    begun(tmp_path / "run", FakeGrid({CLIENT: STILL, **OTHERS}), rounds=2)
    assert json.loads(RunFolder(tmp_path / "run").members_path.read_text()) == [3, 6, 7, 8]
    then = Renumbered({4: STILL, **OTHERS}, number=4)
    start(tmp_path / "run", then, resume=True)
    assert then.asked_of([4]) == []
    assert then.asked_of(OTHERS) == [(3, 8), (4, 6), (5, 7), (6, 8)]


@pytest.mark.usefixtures("quick_grid")
def test_a_run_that_finds_none_of_its_nodes_ends_and_says_why(tmp_path: Path) -> None:
    begun(tmp_path / "run", FakeGrid({3: STILL, 7: STILL}), rounds=1)
    another = FakeGrid({13: STILL, 14: STILL})
    with pytest.raises(
        TimeoutError,
        match=r"0 of 1 nodes are connected \(min_available_nodes\); 2 others have numbers that are "
        r"new in this run, and take no part.*Restart the SuperNode with the key that it had",
    ):
        start(tmp_path / "run", another, resume=True, timeout=0.3)
    assert another.sent == {}


def test_discreets_own_server_keeps_the_nodes_that_take_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [
        *TINY[:3],
        "data.num_clients=4",
        "rounds=6",
        f"output_dir={tmp_path / 'run'}",
        "sampling.kind=cyclic",
        "sampling.groups=2",
        "sampling.min_nodes=3",
        "privacy.user.clip.kind=fixed",
        "privacy.user.noise_multiplier=1",
        "privacy.user.too_noisy=warn",
        "server.round_timeout=30",
    ]
    first = nodes(tmp_path)
    killed_before(4, first)
    with pytest.raises(ServerKilled):
        federated(words, first)
    assert json.loads(RunFolder(tmp_path / "run").members_path.read_text()) == [1, 2, 3, 4]
    then = Nodes(configs={(6 if node == 1 else node): each for node, each in first.configs.items()})
    federated([*words, "resume=true"], then)
    asked = {
        (int(each.metadata.group_id), each.metadata.dst_node_id) for each in then.sent.values()
    }
    assert asked == {(4, 3), (5, 2), (5, 4), (6, 3)}
    assert "nodes [6] have numbers" in caplog.text
    assert "one privacy.user.account" in caplog.text


MADE: dict[str, Callable[[Path], object]] = {
    "is missing: put back the one that belongs to the checkpoint": lambda path: path.unlink(),
    "is damaged: it must contain a list of numbers": lambda path: path.write_text("{}"),
    "is damaged: Expecting value": lambda path: path.write_text("[3, "),
}


@pytest.mark.parametrize("said", MADE)
def test_a_run_that_has_lost_the_numbers_of_its_nodes_does_not_go_on(
    said: str, tmp_path: Path
) -> None:
    begun(tmp_path / "run", FakeGrid({3: STILL, 7: STILL}), rounds=1)
    MADE[said](RunFolder(tmp_path / "run").members_path)
    then = FakeGrid({3: STILL, 7: STILL})
    with pytest.raises(LedgerError, match=said):
        start(tmp_path / "run", then, resume=True)
    assert then.sent == {}


def test_a_crash_between_a_release_and_its_checkpoint_leaves_the_nodes_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*given: object, **more: object) -> None:
        raise ServerKilled

    with monkeypatch.context() as patched:
        patched.setattr("discreet.server.training_run.TrainingRun._keep", killed)
        with pytest.raises(ServerKilled):
            start(tmp_path / "run", FakeGrid({3: STILL, **OTHERS}))
    assert not RunFolder(tmp_path / "run").checkpoint_path.exists()
    then = Renumbered({4: STILL, **OTHERS}, number=4)
    start(tmp_path / "run", then, resume=True)
    assert {node for _, node in then.asked_of(range(10))} == {*OTHERS}


def test_before_a_release_the_nodes_that_are_connected_then_take_part(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    RunMembers(folder).keep([1, 2])
    members = RunMembers.of(Plan(taking_turns(tmp_path).config), folder)
    assert members is not None
    assert members.among([2, 3]) == [2, 3]
    members.keep([2, 3])
    assert members.among([1, 3]) == [3]


@pytest.mark.usefixtures("quick_grid")
def test_the_first_cohort_waits_for_nodes_though_a_question_was_asked_before(
    tmp_path: Path,
) -> None:
    grid = FakeGrid({1: STILL, 2: STILL})
    transport = GridTransport(
        cast(Grid, grid), own_messages, timeout=0.1, population_size=3, min_nodes=2
    )
    assert transport.available_clients() == [1, 2]  # a question about the data
    transport.members = RunMembers(RunFolder(tmp_path))
    grid.answers.pop(2)
    with pytest.raises(TimeoutError, match=r"1 of 2 nodes"):
        transport.available_clients()
    grid.answers[3] = STILL
    assert transport.available_clients() == [1, 3]
    grid.answers.pop(1)
    assert transport.available_clients() == [3]  # who is gone does not stop the others


class Simulated(FakeGrid, InMemoryGrid):
    """Nodes of a simulation, which Flower numbers anew at each start."""


def test_a_simulation_whose_clients_take_turns_is_not_resumed(tmp_path: Path) -> None:
    begun(tmp_path, Simulated({CLIENT: STILL, **OTHERS}), rounds=2)
    again = Simulated({number + 10: answer for number, answer in OTHERS.items()})
    with pytest.raises(discreet.ConfigError, match="can't be resumed"):
        start(tmp_path, again, resume=True)
    assert not again.sent
