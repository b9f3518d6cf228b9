"""SuperNodes as processes: one is gone in its turn, others are asked out of theirs, and a server is
killed between exchanges."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dp_accounting import DpEvent

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import START_SECONDS, Federation, demonstration
from discreet.deployment.superlink import SERVER_APP
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.store import FolderStore, NodeState, read_state
from discreet.masking.wire import Stage
from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.mechanisms.round_state import StateInMemory
from discreet.node.nodes import node_client
from discreet.node.work import work_of
from discreet.planning.plan import Plan
from discreet.planning.state import State
from discreet.privacy.randomness import secure_source
from discreet.privacy.sampling import in_turn
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder, RunSecrets, read_status, state_of
from discreet.settings.client_settings import ClientSettings
from discreet.simulation.in_process import simulate
from discreet.simulation.processes import child_processes
from tests.deployment.ends import RUN_SECONDS, end, finish, kill
from tests.deployment.held_server import (
    EVERYBODY,
    OPENED,
    SEED,
    federation_with,
    held_main,
    kept_main,
)
from tests.rounds import round_of

NODES = ["node-0", "node-1", "node-2", "node-3"]
SHARES = demonstration(len(NODES))
ANOTHER_KEY = "node-0-next"  # of the node that is gone in some rounds, in these rounds
# the node that is gone in some rounds, and the one whose policy keeps to its turn
GONE, STRICT = (
    0,
    1,
)
# one of the rounds is its turn; the groups follow from numbers that Flower draws
AWAY, ROUNDS, GROUPS = (
    (2, 3),
    5,
    2,
)
SETTINGS = (
    "data.name=breast_cancer",
    f"data.num_clients={len(NODES)}",
    f"rounds={ROUNDS}",
    "privacy.delta=0.001",
    "model.name=logistic_regression",
    "training.epochs=1",
    "training.batch_size=1000",
    "server.round_timeout=240",
    "sampling.kind=cyclic",
    f"sampling.groups={GROUPS}",
    f"sampling.min_nodes={len(NODES)}",
    "privacy.user.clip.kind=fixed",
    "privacy.user.correlation.kind=bsr",
    "privacy.user.too_noisy=warn",
)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    policy = tmp_path / "policy.json"
    policy.write_text(f'{{"min-groups": {GROUPS}}}')
    with federation_with(kept_main, tmp_path, [*NODES, ANOTHER_KEY]) as federation:
        for number, name in enumerate(NODES):
            words = ("--policy", str(policy)) if number == STRICT else ()
            federation.start_node(name, *SHARES[number], *words)
        federation.wait_for_nodes(NODES)
        yield federation


def held_after(number: int, federation: Federation) -> None:
    """Waits until the server holds after a round; it goes on when `hold` is written again."""
    wait_until((federation.folder / "held").exists, RUN_SECONDS, f"round {number} is done")
    (federation.folder / "held").unlink()


@pytest.mark.slow
def test_who_is_gone_in_its_turn_adds_zero_and_who_is_asked_out_of_it_is_not_counted(
    federation: Federation,
) -> None:
    hold = federation.folder / "hold"
    hold.write_text("1")
    folder = federation.run("run", *SETTINGS)
    held_after(1, federation)
    end(federation, NODES[GONE])
    federation.start_node(ANOTHER_KEY, *SHARES[GONE])
    federation.wait_for_nodes([ANOTHER_KEY])
    hold.write_text("3")
    held_after(3, federation)
    end(federation, ANOTHER_KEY)
    federation.start_node(NODES[GONE], *SHARES[GONE])
    wait_until(lambda: len(numbers_in(federation, GONE)) == 2, START_SECONDS, "the node is back")
    hold.write_text("")
    finish(federation, folder)

    ids = [numbers_in(federation, number)[-1] for number in range(len(NODES))]
    assert len(set(numbers_in(federation, GONE))) == 1  # who comes back is in its old group
    assert json.loads(folder.members_path.read_text()) == sorted(ids)
    charged = [
        check_round(number, ids, federation.folder / "kept", folder)
        for number in range(1, ROUNDS + 1)
    ]
    check_account(charged, folder)
    status = read_status(folder)
    assert status.failures == {"refused": 1}  # in the one of two rounds that is not its turn
    assert "is not this client's turn" in str(status.last_failure)
    assert not [
        each
        for name in NODES
        for each in DurableLedger(federation.folder / f"{name}.db").releases()
    ]


def numbers_in(federation: Federation, number: int) -> list[int]:
    """The numbers by which the server knew a node, at each of its starts."""
    return [
        int(found) for found in re.findall(r"SuperNode ID: (\d+)", federation.says(NODES[number]))
    ]


def check_round(number: int, ids: list[int], kept: Path, folder: RunFolder) -> DpEvent:
    """The round of the clients whose turn it is and who are there, in this process, from the state
    before and with the keys of the noise, is the one that ran. Returns what it costs."""
    plan, charged = Plan(folder.read_config()), list[DpEvent]()
    before, after = (RunFolder(kept / str(each)).load_checkpoint() for each in (number - 1, number))
    earlier, secrets = (RunSecrets(kept / str(each)).load() for each in (number - 1, number))
    assert number == 1 or secrets["keys"][:-1].equal(earlier["keys"])
    there = [each for each in range(len(NODES)) if in_turn(ids[each], number, groups=GROUPS)]
    there = [each for each in there if each != GONE or number not in AWAY]
    before = replace(before, carried=StateInMemory(earlier))
    replies = [answer(each, ids[each], before, plan.run, number) for each in there]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CorrelatedNoise, "_keys", lambda *_: secrets["keys"])
        source = secure_source()
        found, released = round_of(
            plan.mechanism, before, replies, source, optimizer=plan.optimizer, charge=charged.append
        )
    assert found.params.numpy() == pytest.approx(after.params.numpy(), abs=1e-5)
    assert released.total.numpy() == pytest.approx(secrets["total"].numpy(), abs=1e-5)
    row = folder.read_metrics()[number - 1]
    assert (row["round"], row["replies"]) == (number, len(there))
    assert row["cohort"] == (len(NODES) if number in EVERYBODY else len(there))
    return charged[0]


def answer(
    number: int, node_id: int, before: State, run: ClientSettings, round_number: int
) -> TrainReply:
    """The reply of a node, made here."""
    asked = TrainRequest(round_number, before.clip_norm, run)
    client = node_client(
        work_of(asked), {"partition-id": number, "num-partitions": len(NODES)}, node_id
    )
    return client.answer(work_of(asked), before.params)


def check_account(charged: list[DpEvent], folder: RunFolder) -> None:
    """Each round is charged once, by its number alone, and all of them reach the target that chose
    the noise."""
    spent, planned = DurableLedger(folder.ledger_path).spent("user"), PrivacyLedger()
    for event in charged:
        planned = planned.record(event)
    assert spent == planned
    assert 7.9 < spent.epsilon(0.001) <= 8 * (1 + 1e-9)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(spent.epsilon(0.001))


THREE = ["node-0", "node-1", "node-2"]
MASKED_ROUNDS = 2
# Where it is killed: before a stage is sent, or when the sum is open and nothing is written yet.
PLACES = {
    "SHARES": Stage.KEYS,
    "MASKED": Stage.SHARES,
    "CONFIRM": Stage.MASKED,
    "UNMASK": Stage.CONFIRM,
    OPENED: None,
}
# of these: after masked vectors have left, after the server was to ask for shares
NODES_PAID, SERVER_PAID = (
    3,
    2,
)
MASKED = (
    "data.name=breast_cancer",
    f"data.num_clients={len(THREE)}",
    f"rounds={MASKED_ROUNDS}",
    "privacy.delta=0.001",
    "model.name=logistic_regression",
    "training.epochs=1",
    "training.batch_size=1000",
    "sampling.kind=everyone",
    f"sampling.min_nodes={len(THREE)}",
    "server.round_timeout=240",
    "privacy.user.aggregation=secure",
    "privacy.accountant=rdp",
    "privacy.secure.dropouts=0",
    "privacy.user.noise_multiplier=1e-9",
    "privacy.user.too_noisy=warn",
    "privacy.user.clip.kind=fixed",
)


@pytest.fixture
def masked_federation(tmp_path: Path) -> Iterator[Federation]:
    with federation_with(held_main, tmp_path, THREE) as masked_federation:
        for number, name in enumerate(THREE):
            masked_federation.start_node(name, "--partition", str(number), "--of", str(len(THREE)))
        masked_federation.wait_for_nodes(THREE)
        yield masked_federation


def killed_at(place: str, masked_federation: Federation, *words: str) -> None:
    """Runs until the server holds at that place, and kills all of it: SuperLink and ServerApp."""
    held = masked_federation.folder / "held"
    (masked_federation.folder / "hold").write_text(place)
    masked_federation.run("run", *words)
    wait_until(held.exists, RUN_SECONDS, f"the server holds at {place}")
    apps = child_processes(masked_federation.processes["superlink"].pid, SERVER_APP)
    assert apps
    kill(masked_federation, "superlink")
    for pid in apps:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    held.unlink()
    masked_federation.start_superlink()


def releases(path: Path) -> int:
    """The number of sums that a ledger has paid for."""
    return DurableLedger(path).spent("user").num_releases


def states(folder: Path) -> dict[str, NodeState]:
    """The state of a node, by the name of the run of a server's process."""
    found = {path.stem: FolderStore(folder).load(path.stem) for path in folder.glob("*.state")}
    return {run: read_state(state) for run, state in found.items() if state is not None}


@pytest.mark.slow
def test_a_server_killed_between_any_two_exchanges_ends_with_the_same_model(
    masked_federation: Federation,
) -> None:
    words = MASKED
    for place in PLACES:
        killed_at(place, masked_federation, *words)
        words = ("resume=true", *MASKED)
    (masked_federation.folder / "hold").write_text("")
    folder = masked_federation.run("run", *words)
    finish(masked_federation, folder)

    assert state_of(folder) == "finished"
    assert [(row["round"], row["replies"]) for row in folder.read_metrics()] == [(1, 3), (2, 3)]
    check_model(folder, masked_federation.folder / "undisturbed")
    assert DurableLedger(folder.ledger_path).verify() == []
    assert releases(folder.ledger_path) == SERVER_PAID + MASKED_ROUNDS
    opened = check_opened(masked_federation.folder / "unmasked")
    for name in THREE:
        check_node(name, masked_federation, opened)


def check_model(folder: RunFolder, undisturbed: Path) -> None:
    """The last model is that of clients in one process, without masks, but for a few steps of the
    grid and of noise."""
    simulate(*load_asked([*MASKED, f"seed={SEED}", f"output_dir={undisturbed}"]))
    there, here = folder.load_checkpoint(), RunFolder(undisturbed).load_checkpoint()
    assert here.params.abs().max() > 0.05
    assert torch.allclose(there.params, here.params, atol=1e-3)


def check_opened(path: Path) -> set[str]:
    """Each sum was opened once, for all nodes, by one share of each; the runs of which one was."""
    facts = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(fact["sets"] == [THREE, []] for fact in facts)
    given = [(fact["run"], fact["round"], fact["name"]) for fact in facts]
    assert len(given) == len(set(given)) == len(THREE) * (1 + MASKED_ROUNDS)
    return {fact["run"] for fact in facts}


def check_node(name: str, masked_federation: Federation, opened: set[str]) -> None:
    """It paid for each vector that left it, gave no share in the runs that were killed before, and
    stands where each of them was killed."""
    paid = releases(masked_federation.folder / f"{name}.db")
    assert (
        paid
        == masked_federation.says(name).count("a masked vector of")
        == NODES_PAID + MASKED_ROUNDS
    )
    remembered = states(masked_federation.folder / f"{name}.masking")
    assert {run for run, state in remembered.items() if state.closed >= 1} == opened
    left = [state.attempts[1].stage for run, state in remembered.items() if run not in opened]
    assert sorted(left) == sorted(stage for stage in PLACES.values() if stage is not None)
