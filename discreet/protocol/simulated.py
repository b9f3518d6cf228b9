"""Files in a simulation's run folder: a ticket, which proves a simulation to a process, and keys
for masked sums.

On a real node a server must not choose which client the node is, nor the place of its account, nor
its random numbers. So a message alone can't choose them. A simulation writes a random ticket to its
run folder, readable by its own user only, and sends it along: a process that finds the same ticket
in that folder shares the simulation's disk. A remote server knows no ticket on the node's disk.

For masked sums a simulation makes the keys of all virtual clients. In a federation each owner has
one key."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

TICKET = ".simulation_ticket"
FOLDER = "masking"
PEERS = "peers.json"
# The keys of `node_config` in Flower's simulation.
SIMULATION_KEYS = {
    "partition-id",
    "num-partitions",
}


def is_simulations(node_config: Mapping[str, object], folder: Path, ticket: str) -> bool:
    """True in a virtual client's process: the ticket is in the folder, and no owner has configured
    a node here."""
    try:
        found = (folder / TICKET).read_text()
    except (OSError, ValueError):
        return False
    same = len(ticket) == 64 and secrets.compare_digest(found.encode(), ticket.encode())
    return same and node_config.keys() <= SIMULATION_KEYS


@dataclass(frozen=True)
class MembershipFiles:
    """The files that a node needs to take part in masked sums.

    Attributes:
      name: the node's name in the list of its peers.
      key: the file with its private key.
      peers: the file with the public keys of all nodes.
      state: the folder of its state.
    """

    name: str
    key: Path
    peers: Path
    state: Path


def virtual_files(run_folder: Path, name: str) -> MembershipFiles:
    """The files of one virtual client."""
    folder = run_folder / FOLDER
    return MembershipFiles(name, folder / f"{name}.key", folder / PEERS, folder / f"state-{name}")


def set_up_simulation(folder: Path, held: ExitStack, *, members: int) -> str:
    """Writes a ticket, and keys for a number of `members` of masked sums; both are removed when
    `held` closes. Returns the ticket."""
    ticket = leave_ticket(folder)
    held.callback((folder / TICKET).unlink, missing_ok=True)
    if members:
        keys = folder / FOLDER
        shutil.rmtree(keys, ignore_errors=True)  # old keys, with their state
        held.callback(shutil.rmtree, keys, ignore_errors=True)
        keys.mkdir(mode=0o700)
        from discreet.masking.identity import Identity

        people = [Identity.generate(str(client)) for client in range(members)]
        for person in people:
            _write(virtual_files(folder, person.name).key, person.private_text())
        (keys / PEERS).write_text(
            json.dumps({person.name: person.public_text() for person in people}, indent=1)
        )
    return ticket


def leave_ticket(folder: Path) -> str:
    """Writes a new ticket to the folder of a simulation, and returns it."""
    ticket = secrets.token_hex(32)
    (folder / TICKET).unlink(missing_ok=True)
    _write(folder / TICKET, ticket.encode())
    return ticket


def _write(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
