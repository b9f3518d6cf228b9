"""Keys for the masked sums of a simulation's virtual clients: made for the run, in its folder.

The clients run in processes of their own, as nodes do. In a federation each key is its owner's, and nobody has two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER, PEERS = "masking", "peers.json"


@dataclass(frozen=True)
class MembershipFiles:
    """The files that a node needs to take part in masked sums.

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
