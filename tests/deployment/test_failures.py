"""Strangers, a second node with a key in use, and a node that is unregistered are sent away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flwr.app import Message

from discreet.deployment.certificates import PEERS_FILE, make_secrets
from discreet.deployment.flower_home import free_port, wait_until
from discreet.deployment.local_federation import START_SECONDS, Federation, empty_federation
from discreet.deployment.raw_node import raw_node

pytestmark = pytest.mark.slow

NODES = ["honest-0", "honest-1", "late", "leaves"]


def silent(message: Message) -> None:
    return None


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with empty_federation(tmp_path_factory.mktemp("failures"), NODES) as federation:
        yield federation


def test_strangers_and_a_second_node_with_a_key_in_use_are_refused(federation: Federation) -> None:
    key, address = federation.secrets / "nodes" / "late.key", f"127.0.0.1:{federation.proxy_port}"
    with raw_node(address, authority=federation.authority, key=key, behaviour=silent):
        check_refused(federation)


def check_refused(federation: Federation) -> None:
    strangers = make_secrets(federation.folder / "strangers", ["stranger"])
    own_list = ("--peers", str(strangers / "public" / PEERS_FILE))  # with another one it would not even start
    key = ("--key", str(strangers / "nodes" / "stranger.key"), *own_list)
    wrong_authority = ("--authority", str(strangers / "ca.crt"))
    no_tls = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{federation.proxy_port}"]
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
