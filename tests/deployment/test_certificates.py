"""scripts/certs: what it makes is what TLS and Flower take, and nothing is ever overwritten."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from discreet.deployment.certificates import main, make_authority, make_node, make_server


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    make_server(tmp_path, ["fl.example.org", "192.0.2.7"])
    return tmp_path


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_server_certificate_is_valid_for_its_names_and_a_clock_that_is_a_minute_behind(secrets: Path) -> None:
    server = certificate(secrets / "server.crt")
    assert server.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=1)
    assert server.not_valid_after_utc < datetime.now(UTC) + timedelta(days=398)
    builder = PolicyBuilder().store(Store([certificate(secrets / "ca.crt")]))
    for host in ("fl.example.org", "localhost", "superlink", "gate"):
        assert builder.build_server_verifier(x509.DNSName(host)).verify(server, [])
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("other.example.org")).verify(server, [])


def test_a_node_key_is_what_flower_takes_and_private_keys_are_for_their_owner_alone(secrets: Path) -> None:
    make_node(secrets, "hospital-a")
    private = load_ssh_private_key((secrets / "nodes" / "hospital-a.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == load_ssh_public_key((secrets / "public" / "hospital-a.pub").read_bytes())
    for name in ("ca.key", "server.key", "nodes/hospital-a.key"):
        assert stat.S_IMODE((secrets / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("words", [["server", "localhost"], ["all"]])
def test_nothing_is_overwritten(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
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
