"""scripts/certs: what it makes is what TLS and Flower take, and nothing is ever overwritten."""

from __future__ import annotations

import os
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from discreet.deployment.certificates import (
    CertificateError,
    main,
    make_authority,
    make_node,
    make_server,
    register_node,
)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    make_authority(tmp_path)
    make_server(tmp_path, ["fl.example.org", "192.0.2.7"])
    return tmp_path


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.mark.parametrize("host", ["fl.example.org", "localhost", "superlink", "gate"])
def test_the_server_certificate_is_valid_for_its_names(secrets: Path, host: str) -> None:
    builder = PolicyBuilder().store(Store([certificate(secrets / "ca.crt")]))
    verifier = builder.build_server_verifier(x509.DNSName(host))
    assert verifier.verify(certificate(secrets / "server.crt"), [])
    with pytest.raises(VerificationError):
        builder.build_server_verifier(x509.DNSName("other.example.org")).verify(certificate(secrets / "server.crt"), [])


def test_openssl_agrees_where_it_is_installed(secrets: Path) -> None:
    words = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_ip", "192.0.2.7"]
    try:
        answer = subprocess.run([*words, "-CAfile", secrets / "ca.crt", secrets / "server.crt"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    assert answer.returncode == 0, answer.stderr


def test_a_clock_that_is_a_minute_behind_still_finds_it_valid(secrets: Path) -> None:
    server = certificate(secrets / "server.crt")
    assert server.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=1)
    assert server.not_valid_after_utc < datetime.now(UTC) + timedelta(days=398)


def test_a_node_key_is_what_flower_takes(tmp_path: Path) -> None:
    make_node(tmp_path, "hospital-a")
    private = load_ssh_private_key((tmp_path / "nodes" / "hospital-a.key").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "public" / "hospital-a.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public


def test_private_keys_are_for_their_owner_alone(secrets: Path) -> None:
    make_node(secrets, "a")
    for path in (secrets / "ca.key", secrets / "server.key", secrets / "nodes" / "a.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("words", [["authority"], ["server", "localhost"], ["node", "node-0"], ["all"]])
def test_nothing_is_overwritten(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path), "all"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["--folder", str(tmp_path), *words]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_half_made_pair_is_not_completed(tmp_path: Path) -> None:
    make_node(tmp_path, "a")
    (tmp_path / "nodes" / "a.key").unlink()
    with pytest.raises(CertificateError, match=r"a\.pub exist"):
        make_node(tmp_path, "a")


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a"])
def test_a_node_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CertificateError, match="plain file name"):
        make_node(tmp_path, name)


def test_a_server_needs_the_authority(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"ca\.crt is missing: scripts/certs authority"):
        make_server(tmp_path, ["localhost"])


def test_only_a_key_that_is_there_can_be_registered(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="scripts/certs node a makes it"):
        register_node(tmp_path / "a.pub", connection="deployment")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_the_authority_key_is_not_given_to_the_container_user(tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path), "--owner", "10001", "all"]) == 0
    owners = {path.name: path.stat().st_uid for path in tmp_path.rglob("*")}
    assert owners["ca.key"] == 0
    assert {owner for name, owner in owners.items() if name != "ca.key"} == {10001}
