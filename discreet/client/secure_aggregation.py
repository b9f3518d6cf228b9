"""A node's part in a round under secure aggregation: it answers masking requests, and sends no update in the clear.

What it signs, shares and masks is `discreet.masking`'s matter. Here the node says by its owner's files who it is,
trains, noises its own vector, and charges its own ledger, by its own count of what the sum costs, before the masked
vector leaves: from then on the others can open the sum without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flwr.app import RecordDict

from discreet.client.account import Refused
from discreet.client.policy import check_sums, policy_from
from discreet.federated.masked_messages import (
    WHO,
    Member,
    asked_bytes,
    member_content,
    read_masking,
    reply_content,
    terms_of,
)
from discreet.federated.messages import VirtualClient
from discreet.federated.simulation_keys import MembershipFiles, virtual_files
from discreet.federated.simulation_ticket import is_simulations
from discreet.masking.agreement import MaskingRefused, Terms
from discreet.masking.attempts import OVER
from discreet.masking.identity import Directory, Identity, IdentityError
from discreet.masking.node import MaskingNode
from discreet.masking.store import FolderStore
from discreet.masking.wire import MalformedBytes, Stage, contents

if TYPE_CHECKING:
    from discreet.client.masked_work import MaskedWork

# Of `--node-config`: a name, a file with the node's private key, one with all public keys, a folder for its state.
NAME, KEY, PEERS, STATE = "name", "identity-key", "peers", "masking-state"
FORGOTTEN_SECONDS = 3600.0  # after that another run, which was killed, is over for this node

logger = logging.getLogger("discreet.client")


def answer_masking(
    content: RecordDict, node_config: Mapping[str, object], *, work: Callable[[], MaskedWork]
) -> RecordDict:
    """The reply to a masking request: who this node is, its part of one or two stages, or its masked vector.

    `work` reads what a masked vector is made of. It is called only if one is asked for: the other stages cost no model
    and no data.

    Raises:
      Refused: the owner has not set the node up for it, a policy or a budget forbids the work, or the request is not
        one that this node answers, by the rules of `discreet.masking.node`.
      MalformedMessage: the message can't be read.
    """
    request, virtual = read_masking(content)
    membership = membership_of(virtual, node_config)
    if request == WHO:
        return member_content(Member(membership.identity.name, membership.directory.names))
    try:
        asked = contents(request)
    except MalformedBytes as error:
        raise Refused(f"malformed: {error}") from error
    stages = {stage for stage, _ in asked.stages}
    if Stage.KEYS in stages:
        # A node gives no keys for a sum that its owner does not allow.
        check_sums(policy_from(node_config), colluding=asked.terms.colluding, summands=asked.terms.summands)
        membership.forget(but=asked.terms.run)
    try:
        if Stage.MASKED not in stages:
            # These terms are the server's. With its keys a node signs them, and no later stage may have others: not
            # that of the masked vector either, whose terms are the node's own.
            return reply_content(membership.node(asked.terms).answer(request, _no_vector, _no_vector))
        masked = work()
        node = membership.node(terms_of(asked.terms.run, masked.request.run, masked.sums))
        reply = node.answer(request, masked.vector, masked.release, asked=asked_bytes(masked.request))
    except MaskingRefused as refusal:
        raise Refused(str(refusal)) from refusal
    masked.report(len(reply))
    return reply_content(reply)


def _no_vector() -> NoReturn:
    raise MaskingRefused("a masked vector is asked for without the work")


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
        return _member(virtual_files(folder, str(virtual.client_id)))
    missing = [key for key in (NAME, KEY, PEERS, STATE) if key not in node_config]
    if missing:
        raise Refused(
            f"this node can't take part in secure aggregation without {' and '.join(missing)}: start it with "
            '--node-config \'name="NAME" identity-key="/path/NAME.key" peers="/path/peers.json" '
            'masking-state="/folder"\''
        )
    key, peers, state = (Path(str(node_config[name])) for name in (KEY, PEERS, STATE))
    return _member(MembershipFiles(str(node_config[NAME]), key, peers, state))


def _member(files: MembershipFiles) -> Membership:
    try:
        return Membership.read(files)
    except IdentityError as error:
        logger.error("%s", error)
        raise Refused("this node's key or its list of peers can't be used; its log says why") from error
