"""Where the virtual clients of a simulation find keys for masked sums: made for the run, in its folder.

The clients run in processes of their own, as nodes do. In a federation each key is its owner's, and nobody has two.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from discreet.masking.identity import Identity

FOLDER, PEERS = "masking", "peers.json"


@dataclass(frozen=True)
class MembershipFiles:
    """What a node needs to take part in masked sums.

    Attributes:
      name: which node it is, in the list of its peers.
      key: the file with its private key.
      peers: the file with the public keys of all nodes.
      state: the folder of its state.
    """

    name: str
    key: Path
    peers: Path
    state: Path


def virtual_files(run_folder: Path, name: str) -> MembershipFiles:
    """Those of one virtual client."""
    folder = run_folder / FOLDER
    return MembershipFiles(name, folder / f"{name}.key", folder / PEERS, folder / f"state-{name}")


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
