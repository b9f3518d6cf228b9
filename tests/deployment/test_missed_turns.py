"""SuperNodes that take turns, as processes: one is gone in its turn, and the server asks others out of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import DpEvent

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import START_SECONDS, Federation, demonstration
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.mechanisms.mechanism import Kept
from discreet.node.nodes import node_client
from discreet.privacy.randomness import secure_source
from discreet.privacy.sampling import in_turn
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.server.plan import Plan
from discreet.server.round import dp_fedavg_round, round_settings
from discreet.server.run_folder import RunFolder, RunSecrets, read_status
from discreet.server.state import State
from discreet.settings.client_settings import ClientSettings
from tests.deployment.ends import RUN_SECONDS, end, finish
from tests.deployment.held_server import EVERYBODY, federation_with, kept_main

NODES = ["node-0", "node-1", "node-2", "node-3"]
SHARES = demonstration(len(NODES))
GONE, STRICT = 0, 1  # the node that is gone in some rounds, and the one whose policy keeps to its turn
AWAY, ROUNDS, GROUPS = (2, 3), 5, 2  # one of the rounds is its turn; the groups follow from numbers that Flower draws
SETTINGS = (
    *("data.name=breast_cancer", f"data.num_clients={len(NODES)}", f"rounds={ROUNDS}", "privacy.delta=0.001"),
    *("model.name=logistic_regression", "training.epochs=1", "training.batch_size=1000", "server.round_timeout=240"),
    *("sampling.kind=cyclic", f"sampling.groups={GROUPS}", f"sampling.min_nodes={len(NODES)}"),
    *("privacy.user.clip.kind=fixed", "privacy.user.correlation.kind=bsr", "privacy.user.too_noisy=warn"),
)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    policy = tmp_path / "policy.json"
    policy.write_text(f'{{"min-groups": {GROUPS}}}')
    with federation_with(kept_main, tmp_path, NODES) as federation:
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
def test_who_is_gone_in_its_turn_adds_zero_and_who_is_asked_out_of_it_is_not_counted(federation: Federation) -> None:
    hold = federation.folder / "hold"
    hold.write_text("1")
    folder = federation.run("run", *SETTINGS)
    held_after(1, federation)
    end(federation, NODES[GONE])
    hold.write_text("3")
    held_after(3, federation)
    federation.start_node(NODES[GONE], *SHARES[GONE])
    wait_until(lambda: len(numbers_in(federation, GONE)) == 2, START_SECONDS, "the node is back")
    hold.write_text("")
    finish(federation, folder)

    ids = [numbers_in(federation, number)[-1] for number in range(len(NODES))]
    assert len(set(numbers_in(federation, GONE))) == 1  # who comes back is in its old group
    charged = [check_round(number, ids, federation.folder / "kept", folder) for number in range(1, ROUNDS + 1)]
    check_account(charged, folder)
    status = read_status(folder)
    assert status is not None
    assert status.failures == {"refused": 1}  # in the one of two rounds that is not its turn
    assert "is not the turn of this client" in str(status.last_failure)
    assert not [each for name in NODES for each in DurableLedger(federation.folder / f"{name}.db").releases()]


def numbers_in(federation: Federation, number: int) -> list[int]:
    """The numbers by which the server knew a node, at each of its starts."""
    return [int(found) for found in re.findall(r"SuperNode ID: (\d+)", federation.says(NODES[number]))]


def check_round(number: int, ids: list[int], kept: Path, folder: RunFolder) -> DpEvent:
    """The round of the clients whose turn it is and who are there, in this process, from the state before and with the
    keys of the noise, is the one that ran. Returns what it costs."""
    plan, charged = Plan(folder.read_config()), list[DpEvent]()
    before, after = (RunFolder(kept / str(each)).load_checkpoint() for each in (number - 1, number))
    earlier, secrets = (RunSecrets(kept / str(each)).load() for each in (number - 1, number))
    assert before is not None
    assert after is not None
    assert number == 1 or secrets["keys"][:-1].equal(earlier["keys"])
    there = [each for each in range(len(NODES)) if in_turn(ids[each], number, groups=GROUPS)]
    there = [each for each in there if each != GONE or number not in AWAY]
    settings = replace(round_settings(plan), kept=Kept(earlier))
    replies = [answer(each, ids[each], before, plan.run, number) for each in there]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CorrelatedNoise, "_keys", lambda *_: secrets["keys"])
        found, released = dp_fedavg_round(before, replies, settings, source=secure_source(), charge=charged.append)
    assert found.params.numpy() == pytest.approx(after.params.numpy(), abs=1e-5)
    assert released.total.numpy() == pytest.approx(secrets["total"].numpy(), abs=1e-5)
    row = folder.read_metrics()[number - 1]
    assert (row["round"], row["replies"]) == (number, len(there))
    assert row["cohort"] == (len(NODES) if number in EVERYBODY else len(there))
    return charged[0]


def answer(number: int, node_id: int, before: State, run: ClientSettings, round_number: int) -> TrainReply:
    """The reply of a node, made here."""
    asked = TrainRequest(round_number, before.clip_norm, run)
    client = node_client(asked, {"partition-id": number, "num-partitions": len(NODES)}, node_id)
    return client.answer(asked, before.params)


def check_account(charged: list[DpEvent], folder: RunFolder) -> None:
    """Each round is charged once, by its number alone, and all of them reach the target that chose the noise."""
    spent, planned = DurableLedger(folder.ledger_path).spent("user"), PrivacyLedger()
    for event in charged:
        planned = planned.record(event)
    assert spent == planned
    assert 7.9 < spent.epsilon(0.001) <= 8 * (1 + 1e-9)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(spent.epsilon(0.001))
