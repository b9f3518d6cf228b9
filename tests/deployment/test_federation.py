"""Two SuperNodes as processes on loopback, with TLS and node authentication: they train, and
survive their server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flwr.app import Message

from benchmarks.raw_node import raw_node
from discreet.deployment.certificates import PEERS_FILE, make_secrets
from discreet.deployment.flower_home import free_port, wait_until
from discreet.deployment.local_federation import START_SECONDS, Federation, empty_federation
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.run_folder import RunFolder
from tests.deployment.ends import RUN_SECONDS, finish, kill

NODES = ["node-0", "node-1"]
BOTH = (
    "data.num_clients=2",
    "privacy.delta=0.001",
    "sampling.kind=everyone",
    "sampling.min_nodes=2",
)
# The rounds are slow where the machine is: nothing here depends on how long they take.
PATIENT = "server.round_timeout=240"
PRIVATE = (
    "privacy.user.noise_multiplier=2",
    "privacy.example.enabled=true",
    "privacy.example.noise_multiplier=2",
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    with empty_federation(folder, NODES, pause=0.5) as federation:
        for number, name in enumerate(NODES):
            federation.start_node(name, "--partition", str(number), "--of", "2")
        federation.wait_for_nodes(NODES)
        yield federation


def rounds_of(folder: RunFolder) -> list[int]:
    return [int(row["round"] or 0) for row in folder.read_metrics()]


@pytest.mark.processes
def test_it_trains_and_what_the_server_did_before_a_kill_is_kept(federation: Federation) -> None:
    folder = federation.run("private", "rounds=2", PATIENT, *BOTH, *PRIVATE)
    wait_until(lambda: rounds_of(folder), RUN_SECONDS, "the first round is done")

    kill(federation, "superlink")
    before = DurableLedger(folder.ledger_path)
    assert before.verify() == []
    spent, epsilon = len(before.releases()), before.spent("user").epsilon(0.001, "pld")

    federation.start_superlink()
    resumed = federation.run("private", "rounds=2", PATIENT, "resume=true", *BOTH, *PRIVATE)
    finish(federation, resumed)
    ledger = DurableLedger(folder.ledger_path)
    assert rounds_of(folder) == [1, 2]
    assert ledger.verify() == []
    assert len(ledger.releases()) >= max(2, spent)
    assert ledger.spent("user").epsilon(0.001, "pld") > epsilon


@pytest.mark.processes
def test_each_node_keeps_an_account_of_its_own(federation: Federation) -> None:
    folder = RunFolder(federation.folder / "private")
    assert folder.read_metrics()[-1]["replies"] == 2
    ledgers = [DurableLedger(federation.folder / f"{name}.db") for name in NODES]
    spent = [ledger.spent("example").epsilon(0.001, "pld") for ledger in ledgers]
    assert all(epsilon > 0 for epsilon in spent)
    assert folder.read_metrics()[-1]["epsilon_example"] == pytest.approx(max(spent))


AND_STRANGERS = ["honest-0", "honest-1", "late", "leaves"]


def silent(message: Message) -> None:
    return None


@pytest.fixture(scope="module")
def beset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with empty_federation(tmp_path_factory.mktemp("failures"), AND_STRANGERS) as beset:
        yield beset


@pytest.mark.slow
def test_strangers_and_a_second_node_with_a_key_in_use_are_refused(beset: Federation) -> None:
    key, address = beset.secrets / "nodes" / "late.key", f"127.0.0.1:{beset.proxy_port}"
    with raw_node(address, authority=beset.authority, key=key, behaviour=silent):
        check_refused(beset)


def check_refused(beset: Federation) -> None:
    strangers = make_secrets(beset.folder / "strangers", ["stranger"])
    # with another one it would not even start
    own_list = (
        "--peers",
        str(strangers / "public" / PEERS_FILE),
    )
    key = ("--key", str(strangers / "nodes" / "stranger.key"), *own_list)
    wrong_authority = ("--authority", str(strangers / "ca.crt"))
    no_tls = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{beset.proxy_port}"]
    no_key = [*no_tls, "--root-certificates", str(beset.authority), "--max-retries", "1"]
    no_key.remove("--insecure")
    once = ("--partition", "0", "--of", "4", "--max-retries", "1")
    tries = {
        "not registered": beset.start_node("honest-0", *once, *key),
        "wrong authority": beset.start_node("honest-1", *once, *wrong_authority),
        "no TLS": beset.start(
            "no TLS", [*no_tls, "--port", str(free_port()), "--max-retries", "1"]
        ),
        "no key": beset.start("no key", [*no_key, "--port", str(free_port())]),
        "late": beset.start_node(
            "late", *once
        ),  # one key, one node, one client: the other one lives
    }
    for name, process in tries.items():
        wait_until(
            lambda process=process: process.poll() is not None,
            START_SECONDS,
            f"{name} has given up",
        )
        assert process.returncode == 1, name
    assert all("Failed to activate SuperNode" in beset.says(name) for name in ("honest-0", "late"))
    assert "certificate verify failed" in beset.says("honest-1")
    assert not any(
        "SuperNode ID" in beset.says(name)
        for name in ("honest-0", "honest-1", "late", "no TLS", "no key")
    )
