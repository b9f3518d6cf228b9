"""What a simulation leaves in its run folder for virtual clients, and takes back when it is over."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path

from discreet.federated.simulation_keys import erase_keys, make_keys
from discreet.federated.simulation_ticket import TICKET
from discreet.settings import RunConfig


def set_up_simulation(config: RunConfig, folder: Path, held: ExitStack) -> str:
    """Leaves a ticket, and under secure aggregation keys for the run, as long as `held` is open; the ticket."""
    ticket = leave_ticket(folder)
    held.callback(take_ticket_back, folder)
    if config.privacy.masked:
        make_keys(folder, [str(client) for client in range(config.population_size)])
        held.callback(erase_keys, folder)
    return ticket


def leave_ticket(folder: Path) -> str:
    """A new ticket, which lies in the folder of a simulation from now on."""
    ticket = secrets.token_hex(32)
    path = folder / TICKET
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(ticket)
    return ticket


def take_ticket_back(folder: Path) -> None:
    """The simulation is over."""
    (folder / TICKET).unlink(missing_ok=True)
