"""Files in a simulation's run folder: a ticket, which proves a simulation to a process, and keys
for masked sums. `discreet.flower.simulated_nodes` makes them.

On a real node a server must not choose which client the node is, nor the place of its account, nor
its random numbers. So a message alone can't choose them. A simulation writes a random ticket to its
run folder, readable by its own user only, and sends it along: a process that finds the same ticket
in that folder shares the simulation's disk. A remote server knows no ticket on the node's disk.

For masked sums a simulation makes the keys of all virtual clients. In a federation each owner has
one key."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
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
