"""A federation with nodes that send garbage, nothing or too late, die or join in the middle; SIGTERM."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from discreet.cli.status import status_facts
from discreet.client.nodes import node_client, share_of
from discreet.deployment.certificates import PEERS_FILE
from discreet.deployment.flower_home import CONNECTION, free_port
from discreet.deployment.local_federation import RUN_SECONDS, START_SECONDS, Federation, make_secrets, wait_until
from discreet.deployment.raw_node import Behaviour, raw_node
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.messages import decode_request, encode_reply
from discreet.federated.run_folder import read_status
from discreet.settings.compose import load_config

pytestmark = pytest.mark.slow

NODES = ["honest-0", "honest-1", "garbage", "silent", "late", "victim", "joins", "leaves"]
FOUR = ("data.num_clients=4", "privacy.delta=0.001", "sampling.kind=everyone", "privacy.user.noise_multiplier=2")
SHARED = "sampling.population_size=7"  # beside the four shares of the data, nodes that never hold any
ROUND_SECONDS = 20
ONE_AT_A_TIME = threading.Lock()  # the nodes of this process share one model


def honest(number: int) -> Behaviour:
    def answer(message: Message) -> RecordDict:
        request, params = decode_request(message.content)
        with ONE_AT_A_TIME:
            client = node_client(request, {"partition-id": number, "num-partitions": 4})
            return encode_reply(client.answer(request, params))

    return answer


def garbage(message: Message) -> RecordDict:
    _, params = decode_request(message.content)
    nonsense = Array(torch.full(params.shape, math.nan).numpy())
    return RecordDict({"update": ArrayRecord({"update": nonsense}), "reply": MetricRecord({"round": 1, "below": 1})})


def silent(message: Message) -> None:
    return None


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("failures")
    federation = Federation(folder, make_secrets(folder / "secrets", NODES))
    share_of(load_config(FOUR).data, 0)  # the honest nodes' first answer is not to wait for this
    try:
        federation.start_superlink()
        yield federation
    finally:
        federation.stop()


@pytest.fixture
def join(federation: Federation) -> Iterator[Callable[[str, Behaviour], None]]:
    """Lets a node of this process take part until the test ends."""
    with ExitStack() as stack:

        def start(name: str, behaviour: Behaviour) -> None:
            key, address = federation.secrets / "nodes" / f"{name}.key", f"127.0.0.1:{federation.gate_port}"
            node = raw_node(address, authority=federation.authority, key=key, behaviour=behaviour)
            stack.enter_context(node)

        yield start


def test_strangers_and_a_second_node_with_a_key_in_use_are_refused(
    federation: Federation, join: Callable[[str, Behaviour], None]
) -> None:
    join("late", silent)
    strangers = make_secrets(federation.folder / "strangers", ["stranger"])
    own_list = ("--peers", str(strangers / "public" / PEERS_FILE))  # with another one it would not even start
    key = ("--key", str(strangers / "nodes" / "stranger.key"), *own_list)
    wrong_authority = ("--authority", str(strangers / "ca.crt"))
    no_tls = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{federation.gate_port}"]
    no_key = [*no_tls, "--root-certificates", str(federation.authority), "--max-retries", "1"]
    no_key.remove("--insecure")
    once = ("--partition", "0", "--of", "4", "--max-retries", "1")
    tries = {
        "not registered": federation.start_node("honest-0", *once, *key),
        "wrong authority": federation.start_node("honest-1", *once, *wrong_authority),
        "no TLS": federation.start("no TLS", [*no_tls, "--port", str(free_port()), "--max-retries", "1"]),
        "no key": federation.start("no key", [*no_key, "--port", str(free_port())]),
        "late": federation.start_node("late", *once),  # one key, one node, one client: the other one lives
    }
    for name, process in tries.items():
        wait_until(lambda process=process: process.poll() is not None, START_SECONDS, f"{name} has given up")
        assert process.returncode == 1, name
    assert all("Failed to activate SuperNode" in federation.says(name) for name in ("honest-0", "late"))
    assert "certificate verify failed" in federation.says("honest-1")
    assert not any(
        "SuperNode ID" in federation.says(name) for name in ("honest-0", "honest-1", "late", "no TLS", "no key")
    )


def test_a_node_that_is_unregistered_is_sent_away(federation: Federation) -> None:
    node = federation.start_node("leaves", "--partition", "0", "--of", "4")
    federation.wait_for_nodes(["leaves"])
    (number,) = re.findall(r"SuperNode ID: (\d+)", federation.says("leaves"))
    flwr = federation.start("flwr", ["flwr", "supernode", "unregister", number, CONNECTION])
    assert flwr.wait(START_SECONDS) == 0
    wait_until(lambda: node.poll() is not None, START_SECONDS, "the node has been sent away")


def test_a_round_loses_the_contribution_of_a_failed_node_and_nothing_else(
    federation: Federation, join: Callable[[str, Behaviour], None]
) -> None:
    asked, over = threading.Event(), threading.Event()

    def late(message: Message) -> RecordDict | None:
        asked.set()
        over.wait(RUN_SECONDS)
        return honest(2)(message)

    for name, behaviour in {
        "honest-0": honest(0),
        "honest-1": honest(1),
        "garbage": garbage,
        "silent": silent,
        "late": late,
    }.items():
        join(name, behaviour)
    federation.start_node("victim", "--partition", "3", "--of", "4")
    federation.wait_for_nodes(["victim"])
    folder = federation.run(
        "faults", "rounds=2", SHARED, "sampling.min_nodes=6", f"server.round_timeout={ROUND_SECONDS}", *FOUR
    )
    wait_until(lambda: "Receiving: train message" in federation.says("victim"), RUN_SECONDS, "the victim is at work")
    federation.kill("victim")
    assert asked.wait(RUN_SECONDS)
    join("joins", honest(3))

    wait_until(lambda: len(folder.read_metrics()) == 1, RUN_SECONDS, "the first round is over")
    over.set()
    first = read_status(folder)
    assert first is not None
    assert first.failures == {"late": 3, "malformed": 1}
    federation.finish(folder)
    rows = folder.read_metrics()
    assert (rows[0]["cohort"], rows[0]["replies"]) == (6, 2)
    assert rows[1]["replies"] == 4  # two honest ones, the one that joined, and the late one, in time now
    assert len(DurableLedger(folder.ledger_path).releases()) == 2


def test_sigterm_leaves_ledger_and_checkpoint_whole(
    federation: Federation, join: Callable[[str, Behaviour], None]
) -> None:
    for number in range(2):
        join(f"honest-{number}", honest(number))
    port = free_port()
    watched = (f"operations.metrics_port={port}", "operations.log_format=json")
    folder = federation.run(
        "ended", "rounds=400", "sampling.min_nodes=2", *FOUR, "privacy.user.noise_multiplier=0.1", *watched
    )
    wait_until(lambda: len(folder.read_metrics()) >= 2, RUN_SECONDS, "two rounds are done")
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    assert "discreet_rounds_planned 400.0" in metrics
    assert 'discreet_epsilon{guarantee="example"} +Inf' in metrics
    live = status_facts(folder)
    assert (live["state"], live["rounds"]) == ("running", 400)

    federation.end("superlink")
    federation.finish(folder)
    status, checkpoint = read_status(folder), folder.load_checkpoint()
    assert status is not None
    assert status.state == "interrupted"
    assert checkpoint is not None
    assert checkpoint.round >= 2
    ledger = DurableLedger(folder.ledger_path)
    assert ledger.verify() == []
    assert len(ledger.releases()) in (checkpoint.round, checkpoint.round + 1)
    lines = [json.loads(line) for line in federation.says("run-ended").splitlines() if line.startswith("{")]
    rounds = [line for line in lines if line.get("event") == "round"]
    assert rounds[0]["round"] == 1
    assert rounds[0]["epsilon_example"] == "inf"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
