"""What a simulation in Flower's engine leaves for its virtual clients: a ticket, and keys for
masked sums."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

from discreet.masking.identity import Identity
from discreet.protocol.simulated import FOLDER, PEERS, TICKET, virtual_files


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
