"""Guarded sites as processes: each a SuperNode without rights, with a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from discreet.deployment import flower_home
from discreet.deployment.certificates import PEERS_FILE
from discreet.deployment.flower_home import CONNECTION, wait_until
from discreet.deployment.local_federation import Federation, empty_federation
from discreet.ledger.rollback_guard import STATE_VARIABLE
from tests.guard.unprivileged import NOBODY, ROOT, as_nobody

RUN_SECONDS = 240.0
PREPARE_SECONDS = 240.0  # of kernels for all sites at once
PATIENTS_APP = ROOT / "examples" / "patients"


def names_of(count: int) -> list[str]:
    return [f"node-{number}.guard" for number in range(count)]


@contextmanager
def guarded_federation(
    folder: Path, sites: Sequence[Path], *, read_only: bool = False
) -> Iterator[Federation]:
    """A federation of guarded sites, whose folders hold a guard.toml each; every process ends with
    the block. `read_only`: as Landlock needs Python's folders."""
    names = names_of(len(sites))
    with empty_federation(folder, names) as federation:
        for name, site in zip(names, sites, strict=True):
            start(federation, name, site, read_only=read_only)
        federation.wait_for_nodes(names, prepare_seconds=PREPARE_SECONDS)
        yield federation


def start(federation: Federation, name: str, site: Path, *, read_only: bool = False) -> None:
    """Starts a guarded SuperNode as a user without rights, to whom its folder belongs."""
    given = {
        "key": federation.secrets / "nodes" / f"{name}.key",
        "authority": federation.authority,
        "peers": federation.secrets / "public" / PEERS_FILE,
    }
    for option, path in given.items():
        shutil.copy(path, site / option)
    owned(site)
    command = [
        "env",
        f"{STATE_VARIABLE}={site / 'state'}",
        f"HOME={site}",
        f"FLWR_HOME={site / 'flwr'}",
        sys.executable,
        "-m",
        "discreet.deployment.supernode",
        "--guard",
        str(site / "guard.toml"),
        "--superlink",
        f"127.0.0.1:{federation.proxy_port}",
        "--port",
        str(flower_home.free_port()),
        "--key",
        str(site / "key"),
        "--authority",
        str(site / "authority"),
        "--peers",
        str(site / "peers"),
        "--name",
        name,
    ]
    federation.start(name, as_nobody(command, read_only=read_only))


def owned(folder: Path) -> None:
    """Gives a folder and all in it to the user without rights."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that a user without rights can go through."""
    folder = Path(tempfile.mkdtemp(prefix="sites-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run(federation: Federation, name: str, app: Path, **config: object) -> str:
    """What `flwr run` of an app says; it has ended well."""
    written = " ".join(
        f'{key.replace("_", "-")}="{value}"'
        if isinstance(value, str)
        else f"{key.replace('_', '-')}={value}"
        for key, value in config.items()
    )
    copied = federation.folder / f"app-{name}"
    shutil.copytree(app, copied, ignore=shutil.ignore_patterns("__pycache__"))
    words = ["flwr", "run", str(copied), CONNECTION, "--stream", "--run-config", written]
    process: subprocess.Popen[bytes] = federation.start(name, words)
    nodes = {
        each: federation.processes[each]
        for each in federation.processes
        if each.startswith("node-")
    }

    def over() -> bool:
        ended = [each for each, node in nodes.items() if node.poll() is not None]
        assert not ended, federation.says(ended[0])
        return process.poll() is not None

    wait_until(over, RUN_SECONDS, f"flwr run of {name} is over")
    said = federation.says(name)
    assert process.returncode == 0, said
    return said
