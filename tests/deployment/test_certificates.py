"""scripts/certs makes what TLS and Flower take, and overwrites nothing; the compose files lock
every service down."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from discreet.deployment.certificates import main, make_authority, make_node, make_server
from discreet.deployment.compose_nodes import more_nodes


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    make_server(tmp_path, ["fl.example.org", "192.0.2.7"])
    return tmp_path


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_server_certificate_is_valid_for_its_names_and_a_clock_a_minute_behind(
    secrets: Path,
) -> None:
    server = certificate(secrets / "server.crt")
    assert server.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=1)
    assert server.not_valid_after_utc < datetime.now(UTC) + timedelta(days=398)
    builder = PolicyBuilder().store(Store([certificate(secrets / "ca.crt")]))
    for host in ("fl.example.org", "localhost", "superlink", "gate"):
        assert builder.build_server_verifier(x509.DNSName(host)).verify(server, [])
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("other.example.org")).verify(server, [])


@pytest.mark.parametrize(
    "host",
    ["bad name!", "", "https://fl.example", "fl.example:9092", "300.1.1.1", "a-", "a..b", "grö.de"],
)
def test_what_is_no_host_gets_no_certificate(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_authority(tmp_path)
    assert main(["--folder", str(tmp_path), "server", "fl.example", host]) == 2
    assert f"must be a host name or an IP address, without scheme and port (got {host!r})" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "server.crt").exists()


@pytest.mark.parametrize(
    "host", ["fl.example", "fl_1", "*.fl.example", "10.0.0.1", "::1", "a" * 63]
)
def test_a_host_name_or_an_address_gets_a_certificate(host: str, tmp_path: Path) -> None:
    make_authority(tmp_path)
    assert main(["--folder", str(tmp_path), "server", host]) == 0
    assert (tmp_path / "server.crt").exists()


def test_a_node_key_is_what_flower_takes_and_private_keys_are_for_their_owner_alone(
    secrets: Path,
) -> None:
    make_node(secrets, "hospital-a")
    private = load_ssh_private_key((secrets / "nodes" / "hospital-a.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == load_ssh_public_key(
        (secrets / "public" / "hospital-a.pub").read_bytes()
    )
    for name in ("ca.key", "server.key", "nodes/hospital-a.key"):
        assert stat.S_IMODE((secrets / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("words", [["server", "localhost"], ["all"]])
def test_nothing_is_overwritten(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path), "all"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["--folder", str(tmp_path), *words]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_the_authority_key_is_not_given_to_the_container_user(tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path), "--owner", "10001", "all"]) == 0
    owners = {path.name: path.stat().st_uid for path in tmp_path.rglob("*")}
    assert owners["ca.key"] == 0
    assert {owner for name, owner in owners.items() if name != "ca.key"} == {10001}


ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


SERVICES = {
    **read("docker-compose.yml")["services"],
    "a node of its own": read("docker-compose.node.yml")["services"]["node"],
    **more_nodes(6)["services"],
}


def test_every_service_is_locked_down() -> None:
    for service in SERVICES.values():
        assert (service["read_only"], service["cap_drop"], service["restart"]) == (
            True,
            ["ALL"],
            "unless-stopped",
        )
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
    assert all(
        any(volume.endswith(f"{place}:ro") for volume in own) for place in (":/flwr/apps", ":/data")
    )


def test_the_image_has_one_base_no_root_and_nothing_that_is_not_named() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert {line.split()[1] for line in lines if line.startswith("FROM")} == {"${BASE_IMAGE}"}
    assert "ARG BASE_IMAGE=python:3.11-slim-bookworm" in lines
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*"
    assert not {"!secrets", "!tests", "!outputs", "!.git"} & set(lines)
