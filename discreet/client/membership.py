"""Who a node is in a masked sum: its key, the list of its peers and its state, all of its owner; never the server's.

A virtual client of a simulation finds them in the run folder, where the simulation made them for the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from discreet.client.account import Refused
from discreet.federated.masked_messages import Member
from discreet.federated.messages import VirtualClient
from discreet.federated.simulation_keys import MembershipFiles, virtual_files
from discreet.federated.simulation_ticket import is_simulations
from discreet.masking.agreement import MaskingRefused, Terms
from discreet.masking.identity import Directory, Identity, IdentityError
from discreet.masking.node import MaskingNode
from discreet.masking.store import OVER, FolderStore

# Of `--node-config`: a name, a file with the node's private key, one with all public keys, a folder for its state.
NAME, KEY, PEERS, STATE = "name", "identity-key", "peers", "masking-state"
FORGOTTEN_SECONDS = 3600.0  # after that another run, which was killed, is over for this node

logger = logging.getLogger("discreet.client")


@dataclass(frozen=True)
class Membership:
    """A node among its peers.

    Attributes:
      identity: its name and private key.
      directory: all nodes' public keys, as people compared them.
      state: the folder of its state.
    """

    identity: Identity
    directory: Directory
    state: Path

    @classmethod
    def read(cls, files: MembershipFiles) -> Membership:
        """From files.

        Raises:
          IdentityError: a file is missing or no such key or list, or the list has another key for this node.
        """
        identity, directory = Identity.read(files.name, files.key), Directory.read(files.peers)
        if not directory.has(identity):
            raise IdentityError(f"{files.peers} must hold the public key of {files.name!r}, this node, too")
        return cls(identity, directory, files.state)

    @property
    def member(self) -> Member:
        """What the server is told of it."""
        return Member(self.identity.name, self.directory.names)

    def node(self, terms: Terms) -> MaskingNode:
        """The node in a run with these terms.

        Raises:
          Refused: the run has not as many nodes as the list of peers.
        """
        try:
            return MaskingNode(self.identity, self.directory, terms, FolderStore(self.state))
        except ValueError as error:
            raise Refused(str(error)) from error

    def forget(self, *, but: str, now: float | None = None) -> None:
        """Ends other runs that nobody has gone on with for an hour, those that were killed: their secrets are erased.

        What stays of a run says that it is over. If nodes knew nothing of a round that they have opened, they would
        open it again, and a node that neither sum asked for shares would pay for one of them.
        """
        now, store = time.time() if now is None else now, FolderStore(self.state)
        for path in self.state.glob("*.state"):
            if path.stem != but and now - path.stat().st_mtime > FORGOTTEN_SECONDS:
                with suppress(MaskingRefused), store.locked(path.stem):  # refused: another process answers right now
                    if store.load(path.stem) != OVER:
                        store.save(path.stem, OVER)


def membership_of(virtual: VirtualClient | None, node_config: Mapping[str, object]) -> Membership:
    """The membership of a node, by its own `--node-config`, or of a virtual client.

    Raises:
      Refused: the node has no key, list of peers, name or folder, they can't be used, or this is no simulation. What
        is wrong with a file is only logged: the reason of a refusal goes to the server.
    """
    if virtual is not None:
        folder = Path(virtual.state_folder)
        if not is_simulations(node_config, folder, virtual.ticket):
            raise Refused("the masking request names a virtual client, and this node is no simulation's")
        return _read(virtual_files(folder, str(virtual.client_id)))
    missing = [key for key in (NAME, KEY, PEERS, STATE) if key not in node_config]
    if missing:
        raise Refused(
            f"this node can't take part in secure aggregation without {' and '.join(missing)}: start it with "
            '--node-config \'name="NAME" identity-key="/path/NAME.key" peers="/path/peers.json" '
            'masking-state="/folder"\''
        )
    key, peers, state = (Path(str(node_config[name])) for name in (KEY, PEERS, STATE))
    return _read(MembershipFiles(str(node_config[NAME]), key, peers, state))


def _read(files: MembershipFiles) -> Membership:
    try:
        return Membership.read(files)
    except IdentityError as error:
        logger.error("%s", error)
        raise Refused("this node's key or its list of peers can't be used; its log says why") from error
