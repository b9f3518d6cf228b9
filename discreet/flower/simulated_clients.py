"""What a simulation leaves in its run folder for virtual clients, and takes back when it is over."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from discreet.masking.identity import Identity
from discreet.mechanisms.mechanism_table import masked_mechanism
from discreet.protocol.simulation_keys import FOLDER, PEERS, virtual_files
from discreet.protocol.simulation_ticket import TICKET
from discreet.settings.client_settings import ClientSettings


def set_up_simulation(run: ClientSettings, folder: Path, held: ExitStack) -> str:
    """Leaves a ticket, and under secure aggregation keys for the run, as long as `held` is open; the ticket."""
    ticket = leave_ticket(folder)
    held.callback(take_ticket_back, folder)
    if masked_mechanism(run) is not None:
        make_keys(folder, [str(client) for client in range(run.user.population_size)])
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


def make_keys(run_folder: Path, names: Iterable[str]) -> None:
    """New keys for virtual clients of these names, in place of those of before, whose state goes too."""
    erase_keys(run_folder)
    people = [Identity.generate(name) for name in names]
    (run_folder / FOLDER).mkdir(mode=0o700)
    for person in people:
        path = virtual_files(run_folder, person.name).key
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(person.private_text())
    public = {person.name: person.public_text() for person in people}
    (run_folder / FOLDER / PEERS).write_text(json.dumps(public, indent=1))


def erase_keys(run_folder: Path) -> None:
    """The run is over, and so are its keys."""
    shutil.rmtree(run_folder / FOLDER, ignore_errors=True)
