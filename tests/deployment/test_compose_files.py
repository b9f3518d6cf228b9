"""Promises of the compose files, read from them: nothing runs with rights it does not need, no secret is baked in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from discreet.deployment.compose_nodes import more_nodes

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return loaded


SERVICES = {
    **read("docker-compose.yml")["services"],
    "a node of its own": read("docker-compose.node.yml")["services"]["node"],
    **more_nodes(6)["services"],
}


def test_every_service_is_locked_down() -> None:
    for service in SERVICES.values():
        assert (service["read_only"], service["cap_drop"], service["restart"]) == (True, ["ALL"], "unless-stopped")
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"].startswith("${DISCREET_UID:-10001}")
        assert service["mem_limit"]
        (program,) = (word for word in service["healthcheck"]["test"] if word.endswith(".py"))
        # The Dockerfile copies the folders of this tree to /opt/discreet.
        assert (ROOT / program.removeprefix("/opt/discreet/")).is_file()


def test_every_node_has_a_key_a_ledger_and_a_partition_of_its_own() -> None:
    for number in map(str, range(6)):
        service = SERVICES[f"node-{number}"]
        assert service["environment"]["PARTITION"] == number
        assert {f"ledger-{number}:/ledger", f"known-{number}:/state"} <= {*service["volumes"]}
        assert {"source": f"node-{number}.key", "target": "node.key"} in service["secrets"]
        assert service["networks"] == ["fleet"]


def test_nodes_and_the_server_share_no_network_and_no_volume() -> None:
    server, node = SERVICES["superlink"], SERVICES["node-0"]
    assert not set(server["networks"]) & set(node["networks"])
    assert not {volume.split(":")[0] for volume in server["volumes"]} & {
        volume.split(":")[0] for volume in node["volumes"]
    }
    assert read("docker-compose.yml")["networks"]["fleet"]["internal"] is True
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    own = SERVICES["a node of its own"]["volumes"]
    assert all(any(volume.endswith(f"{place}:ro") for volume in own) for place in (":/flwr/apps", ":/data"))


def test_the_image_has_one_base_no_root_and_nothing_that_is_not_named() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert {line.split()[1] for line in lines if line.startswith("FROM")} == {"python:3.11-slim-bookworm"}
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert not {"!secrets", "!tests", "!outputs", "!.git"} & set(lines)
