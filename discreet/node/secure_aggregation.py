"""A node's part in a round under secure aggregation: it answers masking requests, and sends no
update in the clear.

What it signs, shares and masks is `discreet.masking`'s matter. Here the node says by its owner's
files who it is, trains, noises its own vector, and charges its own ledger, by its own count of what
the sum costs, before the masked vector leaves: from then on the others can open the sum without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from flwr.app import RecordDict

from discreet.masking.identity import Directory, Identity, IdentityError
from discreet.masking.node import MaskingNode
from discreet.masking.store import OVER, FolderStore
from discreet.masking.wire import MalformedBytes, MaskingRefused, Stage, read_request
from discreet.node.account import Refused
from discreet.node.policy import check_sums, policy_from
from discreet.protocol.masked_messages import (
    WHO,
    Member,
    asked_bytes,
    member_content,
    read_masking,
    reply_content,
    terms_of,
)
from discreet.protocol.messages import VirtualClient
from discreet.protocol.simulated import MembershipFiles, is_simulations, virtual_files

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from discreet.privacy.secure_grid import SecureSum
    from discreet.protocol.messages import TrainRequest

# Of `--node-config`: a name, a file with the node's private key, one with all public keys, a folder
# for its state.
NAME = "name"
KEY = "identity-key"
PEERS = "peers"
STATE = "masking-state"
GUARD = ".guard"  # the end of the name of a key that a guard has, and no app
FORGOTTEN_SECONDS = 3600.0  # after that another run, which was killed, is over for this node

logger = logging.getLogger("discreet.client")


class MaskedVector(Protocol):
    """One round's work for a masked sum: `discreet.node.masked_work.MaskedWork`, or that of a
    guard."""

    @property
    def request(self) -> TrainRequest:
        """The request, with its guarantees."""

    @property
    def sums(self) -> SecureSum:
        """The masked sum, by this node's own count."""

    def vector(self) -> NDArray[np.int64]:
        """The vector (length,), noised. Refused before anything is computed."""

    def release(self) -> None:
        """Charges the sum before the masked vector leaves; Refused beyond a budget."""

    def report(self, size: int) -> None:
        """Logs what has left, so many bytes."""


def answer_masking(
    content: RecordDict,
    node_config: Mapping[str, object],
    *,
    work: Callable[[], MaskedVector],
    guarded: bool = False,
) -> RecordDict:
    """The reply to a masking request: who this node is, its part of one or two stages, or its
    masked vector.

    `work` reads what a masked vector is made of. It is called only if one is asked for: the other
    stages cost no model and no data. `guarded`: a site's guard answers, and no app.

    Raises:
      Refused: the owner has not set the node up for it, a policy or a budget forbids the work, or
        the request is not one that this node answers, by the rules of `discreet.masking.node`.
      MalformedMessage: the message can't be read.
    """
    request, virtual = read_masking(content)
    files = files_of(virtual, node_config)
    try:
        identity, directory = read_identity(files, guarded=guarded)
    except IdentityError as error:
        logger.error("%s", error)
        raise Refused(
            "this node's key or its list of peers can't be used; its log says why"
        ) from error
    if request == WHO:
        return member_content(Member(identity.name, directory.names))
    try:
        terms, parts = read_request(request)
    except MalformedBytes as error:
        raise Refused(f"malformed: {error}") from error
    stages = {part.stage for part in parts}
    if Stage.KEYS in stages:
        # A node gives no keys for a sum that its owner does not allow.
        check_sums(policy_from(node_config), colluding=terms.colluding, summands=terms.summands)
        forget(files.state, but=terms.run)
    # The terms are the server's. With its keys a node signs them, and no later stage may have
    # others: not that of the masked vector either, whose terms are the node's own.
    if Stage.MASKED in stages:
        masked = work()
    else:
        masked = None
    if masked is not None:
        terms = terms_of(terms.run, masked.request.run, masked.sums)
    try:
        node = MaskingNode(identity, directory, terms, FolderStore(files.state))
    except ValueError as error:  # the run has not as many nodes as the list of peers
        raise Refused(str(error)) from error
    try:
        if masked is None:
            return reply_content(node.answer(request, _no_work, _no_work))
        reply = node.answer(
            request, masked.vector, masked.release, asked=asked_bytes(masked.request)
        )
    except MaskingRefused as refusal:
        raise Refused(str(refusal)) from refusal
    masked.report(len(reply))
    return reply_content(reply)


def _no_work() -> NoReturn:
    raise MaskingRefused("a masked vector is asked for without the work")


def read_identity(files: MembershipFiles, *, guarded: bool = False) -> tuple[Identity, Directory]:
    """A node's name and private key, and all nodes' public keys, as the owners have compared them.

    Raises:
      IdentityError: a file is missing or no such key or list, the list has another key for this
        node, or `check_guards` does.
    """
    identity = Identity.read(files.name, files.key)
    directory = Directory.read(files.peers)
    if not directory.has(identity):
        raise IdentityError(
            f"{files.peers} must hold the public key of {files.name!r}, this node, too"
        )
    check_guards(identity, directory, guarded=guarded)
    return identity, directory


def check_guards(identity: Identity, directory: Directory, *, guarded: bool) -> None:
    """Raises IdentityError if a guard would add up with a node that has none, or an app would hold
    a guard's key.

    A guard counts on the noise of the other sites. An app that nobody has read adds what it likes,
    and has the key of its node: so the keys that are guards' alone have names of their own.
    """
    if not guarded and identity.name.endswith(GUARD):
        raise IdentityError(f"the key of {identity.name} is a guard's, and no app may have it")
    others = [name for name in directory.names if not name.endswith(GUARD)]
    if guarded and others:
        raise IdentityError(
            f"a guard adds up with guards alone, whose names end in {GUARD}: its list of peers "
            f"has {others[0]}"
        )


def forget(folder: Path, *, but: str, now: float | None = None) -> None:
    """Ends other runs in a node's state that nobody has gone on with for an hour, those that were
    killed: their secrets are erased.

    What stays of a run says that it is over. If nodes knew nothing of a round that they have
    opened, they would open it again, and a node that neither sum asked for shares would pay for one
    of them.
    """
    if now is None:
        now = time.time()
    store = FolderStore(folder)
    for path in folder.glob("*.state"):
        if path.stem != but and now - path.stat().st_mtime > FORGOTTEN_SECONDS:
            with (
                suppress(MaskingRefused),
                store.locked(path.stem),
            ):  # refused: another process answers right now
                if store.load(path.stem) != OVER:
                    store.save(path.stem, OVER)


def files_of(virtual: VirtualClient | None, node_config: Mapping[str, object]) -> MembershipFiles:
    """The files of a node, which its own `--node-config` names, or of a virtual client. Refused if
    they are not named, or this is no simulation."""
    if virtual is not None:
        folder = Path(virtual.state_folder)
        if not is_simulations(node_config, folder, virtual.ticket):
            raise Refused(
                "the masking request names a virtual client, but this node belongs to no simulation"
            )
        return virtual_files(folder, str(virtual.client_id))
    missing = [key for key in (NAME, KEY, PEERS, STATE) if key not in node_config]
    if missing:
        absent = " and ".join(missing)
        raise Refused(
            f"this node can't take part in secure aggregation without {absent} in its --node-config"
        )
    key, peers, state = (Path(str(node_config[name])) for name in (KEY, PEERS, STATE))
    return MembershipFiles(str(node_config[NAME]), key, peers, state)
