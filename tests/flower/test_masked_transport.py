"""Secure aggregation over Flower's grid: the same sums, whoever is missing, and nothing that the
server could read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from flwr.app import Message

from discreet.deployment.certificates import make_node, make_peers
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.wire import Part, Stage, Terms, read_request
from discreet.protocol.masked_messages import read_masking
from discreet.protocol.messages import MASKING
from discreet.protocol.simulated import FOLDER
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder, read_status
from discreet.server.transport import NobodyAnswers
from discreet.simulation.in_process import simulate
from tests.flower.masked_grid import (
    PATIENT,
    Lost,
    Nodes,
    ServerKilled,
    federated,
    nodes,
    stages_of,
    virtual,
    words_of,
)

SHARED_STEP = (
    "privacy.user.enabled=false",
    "privacy.user.aggregation=plain",
    "privacy.user.noise_multiplier=null",
    "privacy.user.target_epsilon=null",
    "privacy.example.enabled=true",
    "privacy.example.aggregation=secure",
    "privacy.example.noise_multiplier=2",
    "training.epochs=1",
    "training.batch_size=100",
)


def first(stage: Stage, node: int, times: int = 1) -> Lost:
    """The node does not answer this stage the first so many times."""
    left = [times]

    def lost(client: int, message: Message) -> bool:
        if client != node or stage not in stages_of(message):
            return False
        left[0] -= 1
        return left[0] >= 0

    return lost


def sums_asked_to_be_opened(grid: Nodes) -> set[tuple[str, int, bytes]]:
    """The run, the round and the attempt of each sum that a node gave shares for."""
    parts = [
        (terms.run, part)
        for terms, given in map(request_of, grid.asked(Stage.UNMASK))
        for part in given
    ]
    return {(run, part.round, part.attempt) for run, part in parts if part.stage is Stage.UNMASK}


def request_of(message: Message) -> tuple[Terms, tuple[Part, ...]]:
    return read_request(read_masking(message.content)[0])


def charges(path: Path) -> int:
    return DurableLedger(path).spent("user").num_releases


def test_a_run_with_masks_is_the_run_without_bit_by_bit(tmp_path: Path) -> None:
    masked = federated(words_of(tmp_path / "masked", "seed=50123", clients=7), virtual(7))
    plain = simulate(*load_asked(words_of(tmp_path / "plain", "seed=50123", clients=7)))
    assert torch.equal(masked.params, plain.checkpoint.params)
    assert masked.clip_norm == plain.checkpoint.clip_norm
    assert not (tmp_path / "masked" / FOLDER).exists()  # a simulation's keys go with it


def test_a_shared_step_equals_the_run_without_masks_and_each_node_charges_its_ledger(
    tmp_path: Path,
) -> None:
    masked = federated(words_of(tmp_path / "masked", *SHARED_STEP, "seed=50123"), virtual(4))
    plain = simulate(
        *load_asked(words_of(tmp_path / "plain", *SHARED_STEP, "seed=50123", "engine=sequential"))
    )
    assert torch.equal(masked.params, plain.checkpoint.params)
    federated(words_of(tmp_path / "run", *SHARED_STEP), nodes(tmp_path))
    server = DurableLedger(tmp_path / "run" / "ledger.db")
    assert server.spent("example").num_releases == 2
    assert not server.spent("user").entries
    for number in range(4):
        assert DurableLedger(tmp_path / f"node-{number}.db").spent("example") == server.spent(
            "example"
        )


@pytest.mark.parametrize("words", ["training.batch_size=2", "privacy.delta=0.2"])
def test_no_refusal_of_a_shared_step_follows_from_the_hidden_number_of_examples(
    words: str, tmp_path: Path
) -> None:
    grid = nodes(tmp_path)
    federated(words_of(tmp_path / "run", *SHARED_STEP, words, "data.num_clients=4", rounds=1), grid)
    assert not grid.refusals()
    for number in range(4):
        ledger = DurableLedger(tmp_path / f"node-{number}.db")
        assert ledger.spent("example").num_releases == 1


def test_a_round_costs_three_exchanges_and_the_first_one_three_more(
    tmp_path: Path,
) -> None:
    grid = nodes(tmp_path)
    federated(words_of(tmp_path / "run", rounds=3), grid)
    asked = [frozenset(stages_of(message)) for message, _ in grid.said]
    exchanges = [
        stages for stages, before in zip(asked, [None, *asked], strict=False) if stages != before
    ]
    first_ones = [set(), {Stage.KEYS}, {Stage.SHARES}]
    a_round = [{Stage.MASKED}, {Stage.CONFIRM, Stage.KEYS}, {Stage.UNMASK, Stage.SHARES}]
    assert exchanges == [
        *first_ones,
        *a_round,
        *a_round,
        {Stage.MASKED},
        {Stage.CONFIRM},
        {Stage.UNMASK},
    ]
    assert grid.refusals() == []
    for message, reply in grid.said:
        assert set(reply.content) == {MASKING}
        masked = Stage.MASKED in stages_of(message)
        assert set(message.content) == ({MASKING, "request", "parameters"} if masked else {MASKING})


def test_each_node_charges_its_own_ledger_what_the_server_charges(tmp_path: Path) -> None:
    federated(words_of(tmp_path / "run", rounds=2), nodes(tmp_path))
    server = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert server.num_releases == 2
    for number in range(4):
        assert DurableLedger(tmp_path / f"node-{number}.db").spent("user") == server


@pytest.mark.usefixtures("quick_grid")
@pytest.mark.parametrize("stage", [Stage.MASKED, Stage.CONFIRM, Stage.UNMASK])
def test_a_node_that_is_late_is_missing_and_takes_part_again(stage: Stage, tmp_path: Path) -> None:
    grid = nodes(tmp_path)
    grid.lost = first(stage, node=2)
    federated(words_of(tmp_path / "run", PATIENT, rounds=3), grid)
    replies = [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()]
    # Who sent its vector is in the sum, whatever becomes of it later; without its shares it has
    # none for the next one.
    assert replies == ([3, 4, 4] if stage is Stage.MASKED else [4, 3, 4])


@pytest.mark.usefixtures("quick_grid")
def test_a_round_with_too_few_nodes_is_abandoned_unread_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid, two = nodes(tmp_path), [first(Stage.MASKED, node) for node in (1, 2)]
    grid.lost = lambda client, message: sum(lost(client, message) for lost in two) > 0
    federated(words_of(tmp_path / "run", PATIENT, rounds=1), grid)
    assert re.search(r"round 1 is abandoned.*\b2 nodes.*MASKED.*\b3 are needed", caplog.text)
    assert charges(tmp_path / "run" / "ledger.db") == 1
    # Two had sent a vector before. It was paid for, and the attempt that takes its place is not
    # paid for again.
    assert [charges(tmp_path / f"node-{number}.db") for number in range(4)] == [1, 1, 1, 1]


@pytest.mark.usefixtures("quick_grid")
def test_a_run_whose_rounds_are_all_abandoned_ends_and_says_so(tmp_path: Path) -> None:
    grid = nodes(tmp_path)
    grid.lost = lambda client, message: client < 3 and Stage.MASKED in stages_of(message)
    with pytest.raises(
        NobodyAnswers, match=r"^round 1 was abandoned 3 times: .* but 3 are needed$"
    ):
        federated(words_of(tmp_path / "run", PATIENT), grid)
    assert read_status(RunFolder(tmp_path / "run")).state == "interrupted"
    assert charges(tmp_path / "run" / "ledger.db") == 0


def test_one_node_with_another_list_of_peers_is_missing_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = nodes(tmp_path)
    listed = json.loads(Path(str(grid.configs[1]["peers"])).read_text())
    make_node(tmp_path / "others", "node-4")
    another = json.loads(make_peers(tmp_path / "others").read_text())
    (tmp_path / "another.json").write_text(json.dumps({**dict([*listed.items()][:3]), **another}))
    grid.configs[1]["peers"] = str(tmp_path / "another.json")
    federated(words_of(tmp_path / "run"), grid)
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [3, 3]
    assert "client 1 malformed: it has another list of" in caplog.text


@pytest.mark.parametrize("stage", [Stage.SHARES, Stage.MASKED, Stage.CONFIRM, Stage.UNMASK])
def test_a_server_killed_between_two_exchanges_resumes_and_nothing_is_opened_twice(
    stage: Stage, tmp_path: Path
) -> None:
    grid = nodes(tmp_path)
    words = words_of(tmp_path / "run", rounds=2)
    grid.killed_at = stage
    with pytest.raises(ServerKilled):
        federated(words, grid)
    grid.killed_at = None
    checkpoint = federated(["resume=true", f"output_dir={tmp_path / 'run'}"], grid)
    assert checkpoint.round == 2
    opened = sums_asked_to_be_opened(grid)
    assert charges(tmp_path / "run" / "ledger.db") >= len(opened)
    assert all(charges(tmp_path / f"node-{number}.db") >= len(opened) for number in range(4))
    assert grid.refusals() == []
