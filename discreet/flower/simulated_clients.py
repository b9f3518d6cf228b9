"""Files that a simulation leaves in its run folder for virtual clients, and removes when it is over."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

from discreet.masking.identity import Identity
from discreet.mechanisms.mechanism_table import masked_mechanism
from discreet.protocol.simulated import FOLDER, PEERS, TICKET, virtual_files
from discreet.settings.client_settings import ClientSettings


def set_up_simulation(run: ClientSettings, folder: Path, held: ExitStack) -> str:
    """Leaves a ticket, and under secure aggregation keys for the run, as long as `held` is open; the ticket."""
    ticket = leave_ticket(folder)
    held.callback((folder / TICKET).unlink, missing_ok=True)
    if masked_mechanism(run) is not None:
        keys = folder / FOLDER
        shutil.rmtree(keys, ignore_errors=True)  # those of before, with their state
        held.callback(shutil.rmtree, keys, ignore_errors=True)
        keys.mkdir(mode=0o700)
        people = [Identity.generate(str(client)) for client in range(run.user.population_size)]
        for person in people:
            _write(virtual_files(folder, person.name).key, person.private_text())
        (keys / PEERS).write_text(json.dumps({person.name: person.public_text() for person in people}, indent=1))
    return ticket


def leave_ticket(folder: Path) -> str:
    """A new ticket, which lies in the folder of a simulation from now on."""
    ticket = secrets.token_hex(32)
    (folder / TICKET).unlink(missing_ok=True)
    _write(folder / TICKET, ticket.encode())
    return ticket


def _write(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
