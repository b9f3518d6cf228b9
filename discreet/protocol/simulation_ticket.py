"""The file that tells a process on the same disk that it is part of a simulation.

On a real node a server must not choose which client the node is, nor where its account is kept, nor its random numbers.
So the word for it does not come with the message alone. A simulation leaves a random ticket in its run folder, readable
by its own user only, and sends it along: whoever finds the same ticket in that folder shares the simulation's disk. A
server elsewhere has nothing to show that lies on the node's disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

TICKET = ".simulation_ticket"
SIMULATION_KEYS = {"partition-id", "num-partitions"}  # of `node_config`, as Flower's simulation makes it


def finds_ticket(folder: Path, ticket: str) -> bool:
    """True if that ticket lies in the folder."""
    try:
        found = (folder / TICKET).read_text()
    except (OSError, ValueError):
        return False
    return len(ticket) == 64 and secrets.compare_digest(found.encode(), ticket.encode())


def is_simulations(node_config: Mapping[str, object], folder: Path, ticket: str) -> bool:
    """True in a virtual client's process: the ticket lies there, and no owner has set up a node here."""
    return node_config.keys() <= SIMULATION_KEYS and finds_ticket(folder, ticket)
