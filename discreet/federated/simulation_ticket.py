"""How a process learns that it is part of a simulation: from a file that the simulation has left on its disk.

On a real node a server must not choose which client the node is, nor where its account is kept, nor its random numbers.
So the word for it does not come with the message alone. A simulation leaves a random ticket in its run folder, readable
by its own user only, and sends it along: whoever finds the same ticket in that folder shares the simulation's disk. A
server elsewhere has nothing to show that lies on the node's disk.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

TICKET = ".simulation_ticket"


def leave_ticket(folder: Path) -> str:
    """A new ticket, which lies in the folder of a simulation from now on."""
    ticket = secrets.token_hex(32)
    path = folder / TICKET
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(ticket)
    return ticket


def finds_ticket(folder: Path, ticket: str) -> bool:
    """Whether that ticket lies in the folder."""
    try:
        found = (folder / TICKET).read_text()
    except (OSError, ValueError):
        return False
    return len(ticket) == 64 and secrets.compare_digest(found.encode(), ticket.encode())


def take_ticket_back(folder: Path) -> None:
    """The simulation is over."""
    (folder / TICKET).unlink(missing_ok=True)
