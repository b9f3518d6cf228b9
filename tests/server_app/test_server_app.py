"""The ServerApp over Flower's own grid, whose server says what a test wants."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from discreet.flower.serving import run
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.run_folder import RunFolder, read_status
from discreet.server.transport import MessagesTooLarge
from discreet.settings.compose import load_config
from strategies.dp_fedavg import dp_fedavg


def full_server() -> SimpleNamespace:
    """Knows two nodes, and takes no message: what a proxy with a limit does."""
    asked = httpx.Request("POST", "https://server/v1/runtime/push-messages")
    too_large = httpx.HTTPStatusError("too large", request=asked, response=httpx.Response(413, request=asked))
    nodes = GetNodesResponse(nodes=[NodeInfo(node_id=1), NodeInfo(node_id=2)])
    return SimpleNamespace(GetNodes=Mock(return_value=nodes), PushMessages=Mock(side_effect=too_large))


def test_messages_that_are_too_large_end_the_run_with_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    grid = HttpGrid(token="a token")
    grid.set_run(Run.create_empty(1))
    monkeypatch.setattr(grid, "_client", full_server())
    words = ["data.num_clients=2", "sampling.kind=everyone", "sampling.min_nodes=2", "privacy.delta=0.01", "rounds=1"]
    config = load_config([*words, "privacy.user.noise_multiplier=2", f"output_dir={tmp_path / 'run'}"])
    with pytest.raises(MessagesTooLarge, match=r"messages of round 1 were refused as too large \(HTTP 413\)"):
        run(grid, config, strategy=dp_fedavg)
    folder = RunFolder(tmp_path / "run")
    status = read_status(folder)
    assert status is not None
    assert status.state == "interrupted"
    assert "HTTP 413" in (status.reason or "")
    assert DurableLedger(folder.ledger_path).releases() == []
