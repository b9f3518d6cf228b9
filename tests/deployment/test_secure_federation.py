"""Secure aggregation between real processes: a server that is killed as masked vectors come in goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from discreet.deployment.local_federation import RUN_SECONDS, Federation, make_secrets, wait_until
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.run_folder import RunFolder

NODES = [f"node-{number}" for number in range(4)]
SECURE = (
    *("data.num_clients=4", "privacy.delta=0.001", "sampling.kind=everyone", "sampling.min_nodes=4"),
    *("privacy.user.aggregation=secure", "privacy.accountant=rdp", "privacy.user.noise_multiplier=1"),
    *("privacy.user.too_noisy=warn", "model.name=linear", "server.round_timeout=240", "rounds=2"),
)
REQUIRING = '{"require": "secure"}'


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path, make_secrets(tmp_path / "secrets", NODES))
    policy = tmp_path / "policy.json"
    policy.write_text(REQUIRING)
    try:
        federation.start_superlink()
        for number, name in enumerate(NODES):
            federation.start_node(name, "--partition", str(number), "--of", "4", "--policy", str(policy))
        federation.wait_for_nodes(NODES)
        yield federation
    finally:
        federation.stop()


def charged(path: Path) -> int:
    """How many sums a ledger has paid for; 0 before the first one."""
    return DurableLedger(path).spent("user").num_releases if path.exists() else 0


@pytest.mark.slow
def test_a_server_killed_between_exchanges_goes_on_and_each_node_has_paid_for_the_sums(federation: Federation) -> None:
    folder = federation.run("run", *SECURE)
    ledgers = [federation.folder / f"{name}.db" for name in NODES]
    # A node pays as its masked vector leaves, the server before it asks for the shares that open the sum.
    wait_until(lambda: any(charged(path) for path in ledgers), RUN_SECONDS, "a masked vector has left a node")
    federation.kill("superlink")

    federation.start_superlink()
    federation.finish(federation.run("run", "resume=true", *SECURE))
    rows = RunFolder(folder.path).read_metrics()
    assert [row["round"] for row in rows] == [1, 2]
    assert [row["replies"] for row in rows] == [4, 4]
    assert DurableLedger(folder.ledger_path).verify() == []
    opened = charged(folder.ledger_path)
    assert opened >= 2
    assert all(charged(path) >= 2 for path in ledgers)

    plain = federation.run("plain", *SECURE, "privacy.user.aggregation=plain")
    federation.finish(plain)
    assert RunFolder(plain.path).read_metrics()[-1]["replies"] == 0
    assert "requires secure aggregation" in federation.says("node-0")
