"""Certificates and node keys of a federation: `scripts/certs COMMAND NAMES...`, below the folder
`secrets`.

    all             authority, server, node-0 to node-3, and peers: for one machine
    authority       ca.crt, by which nodes and flwr check the server, and its private key ca.key:
                    keep it off the server
    server NAME ... server.crt and server.key, for every name and address that nodes and flwr
                    connect to
    node NAME ...   nodes/NAME.key for the node alone, and public/NAME.pub for the server; run it
                    on the node's machine
    peers           public/peers.json, all public/NAME.pub, for secure aggregation: each node gets
                    a copy, and people compare the fingerprints that are printed

Nothing that exists is ever overwritten: a lost key can't be made again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import ipaddress
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from discreet.masking.identity import Identity
from discreet.run_files.whole_files import new_file, replace_file
from discreet.settings.rules import ConfigError

CA_DAYS = 1826
SERVER_DAYS = 397
# Certificates are valid from this long ago, for nodes whose clock is behind.
CLOCK_SKEW = timedelta(minutes=5)
ALREADY_KNOWN = "Public key already in use"  # the message of Flower 1.41
PEERS_FILE = "peers.json"
DEMONSTRATION_NODES = ("node-0", "node-1", "node-2", "node-3")
# Always in the server's certificate: its names on its own host and inside docker-compose.yml.
OWN_HOSTS = ("localhost", "127.0.0.1", "superlink", "gate")
# labels with dots between them, the last of which is no number; the first may be a wildcard
LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
HOST = re.compile(rf"(\*\.)?({LABEL}\.)*(?![0-9]+$){LABEL}")
MOST_OF_HOST = 253  # characters
# the least number of names for each command
NAMES = {"all": 0, "authority": 0, "server": 1, "node": 1, "peers": 0}


def make_authority(folder: Path) -> None:
    """Makes `ca.key` and `ca.crt`: a P-384 authority that may sign servers, but no authorities.
    Raises ConfigError if they exist."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("Discreet federation authority")
    made = _certificate(name, name, key, days=CA_DAYS, is_authority=True)
    made = made.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    _write_pair(folder / "ca", made.sign(key, hashes.SHA384()), key)


def make_server(folder: Path, hosts: Sequence[str]) -> None:
    """Makes `server.key` and `server.crt`, valid for every host name and address that nodes and
    `flwr` connect to. Raises ConfigError if one of the files exists, the authority does not, or one
    of the hosts is neither a name nor an address."""
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *OWN_HOSTS])]
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        signer: Any = load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"scripts/certs authority makes what signs a server's certificate: {error}"
        ) from error
    key = ec.generate_private_key(ec.SECP384R1())
    made = _certificate(
        _name(hosts[0][:64]), authority.subject, key, days=SERVER_DAYS, is_authority=False
    )
    for extension in (
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName(names),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    ):
        made = made.add_extension(extension, critical=False)
    _write_pair(folder / "server", made.sign(signer, hashes.SHA384()), key)


def _general_name(host: str) -> x509.GeneralName:
    """A host name or an IP address, as a certificate has it. ConfigError: it is neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host) or len(host) > MOST_OF_HOST:
            raise ConfigError(
                "a server's name must be a host name or an IP address, without scheme and port "
                f"(got {host!r})"
            ) from None
        return x509.DNSName(host)


def make_node(folder: Path, name: str) -> None:
    """Makes `nodes/NAME.key` and `public/NAME.pub`: a P-384 pair in OpenSSH's format, as Flower
    reads it. Raises ConfigError if they exist, or the name is not a plain file name."""
    if not name or name != Path(name).name or name.startswith("."):
        raise ConfigError(f"a node's name must be a plain file name (got {name!r})")
    node = Identity.generate(name)
    private = node.key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = f"{node.public_text()} {name}\n".encode()
    public_file = folder / "public" / f"{name}.pub"
    _write({folder / "nodes" / f"{name}.key": private, public_file: public})


def make_peers(folder: Path) -> Path:
    """Makes `public/peers.json`: each node's name and public key, from the files beside it. An
    older file is replaced. Raises ConfigError if there are no public keys."""
    keys = {
        path.stem: path.read_text().strip() for path in sorted((folder / "public").glob("*.pub"))
    }
    if not keys:
        raise ConfigError(f"{folder / 'public'} is missing: scripts/certs node makes keys of nodes")
    path = folder / "public" / PEERS_FILE
    replace_file(path, (json.dumps(keys, indent=1) + "\n").encode())
    return path


def make_secrets(folder: Path, nodes: Sequence[str]) -> Path:
    """Makes an authority, a certificate for a server on this machine, the nodes' keys, and the list
    of peers."""
    make_authority(folder)
    make_server(folder, OWN_HOSTS)
    for name in nodes:
        make_node(folder, name)
    if nodes:
        make_peers(folder)
    return folder


def fingerprint(public_key: str) -> str:
    """The fingerprint of a public key in OpenSSH's form, as `ssh-keygen -l` shows it, for people to
    compare."""
    digest = hashlib.sha256(base64.b64decode(public_key.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def register_node(public_key: Path, *, connection: str) -> bool:
    """Registers a node's public key with the SuperLink of a Flower connection; False if it is
    registered already. Raises ConfigError if the SuperLink refuses."""
    # Flower's command line runs in this process: importing it takes a second, and a federation may
    # have many nodes.
    import click
    from flwr.cli.app import app

    words = ["supernode", "register", str(public_key), connection, "--name", public_key.stem]
    try:
        app(words, standalone_mode=False)
    except click.ClickException as error:
        if ALREADY_KNOWN in error.message:
            return False
        raise ConfigError(f"{public_key} can't be registered: {error.message}") from error
    except SystemExit as error:
        raise ConfigError(
            f"{public_key} can't be registered: it is not a public key that Flower takes"
        ) from error
    return True


def give_to(folder: Path, owner: int) -> None:
    """Makes everything but the authority's key belong to a user, so that a container of that user
    can read it."""
    for path in {folder, *folder.rglob("*")} - {folder / "ca.key"}:
        os.chown(path, owner, owner)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    days: int,
    is_authority: bool,
) -> x509.CertificateBuilder:
    """A certificate to be signed, for TLS, or for an authority that signs certificates and
    revocation lists."""
    now = datetime.now(UTC)
    signs = is_authority
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + timedelta(days=days))
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    usage = x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _write_pair(path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(
        {
            path.with_suffix(".crt"): certificate.public_bytes(Encoding.PEM),
            path.with_suffix(".key"): private,
        }
    )


def _write(contents: Mapping[Path, bytes]) -> None:
    """Writes new files, a `.key` readable by its owner alone."""
    if there := [str(path) for path in contents if path.exists()]:
        raise ConfigError(
            f"{' and '.join(there)} exist already and are never overwritten: move them away first"
        )
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.suffix == ".key":
            mode = 0o600
        else:
            mode = 0o644
        # No existing file is replaced, and no key is ever readable by others.
        with new_file(path) as made:
            made.write_bytes(content)
            made.chmod(mode)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/certs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("secrets"),
        help="where the files are (default: secrets)",
    )
    parser.add_argument(
        "--owner", type=int, help="give the files to this user number, for a container (needs root)"
    )
    parser.add_argument("command", choices=NAMES)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args(words)
    needed = NAMES[arguments.command]
    if len(arguments.names) < needed or (arguments.names and not needed):
        parser.error(
            f"{arguments.command} takes {f'{needed} names or more' if needed else 'no name'}"
        )
    return arguments


def main(words: Sequence[str]) -> int:
    """Runs one command; exit code 2 for an error."""
    arguments = _parsed(words)
    folder = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        match arguments.command:
            case "all":
                make_secrets(folder, DEMONSTRATION_NODES)
            case "authority":
                make_authority(folder)
            case "server":
                make_server(folder, arguments.names)
            case "node":
                for name in arguments.names:
                    make_node(folder, name)
            case _:
                for name, key in json.loads(make_peers(folder).read_text()).items():
                    print(f"{name}  {fingerprint(key)}")
        print(f"scripts/certs: made in {folder.resolve()}")
        if arguments.owner is not None:
            give_to(folder, arguments.owner)
    except (ConfigError, PermissionError) as error:
        print(f"scripts/certs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
