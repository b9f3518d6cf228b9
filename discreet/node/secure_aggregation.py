"""A node's part in a round under secure aggregation: it answers masking requests and sends no
unmasked update.

`discreet.masking` decides what it signs, shares and masks. Here the node identifies itself with its
owner's files, charges its own ledger, by its own count of the sum's cost, trains, and noises its
own vector. After the masked vector has left, the other nodes can open the sum without it.
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
from discreet.masking.node import MaskingNode, Release
from discreet.masking.store import OVER, FolderStore
from discreet.masking.wire import MalformedBytes, MaskingRefused, Stage, Terms, read_request
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

# Keys of `--node-config`: a name, a file with the node's private key, one with all public keys, and
# a folder for its state.
NAME = "name"
KEY = "identity-key"
PEERS = "peers"
STATE = "masking-state"
GUARD = ".guard"  # the end of the name of a key that a guard has, and no app
FORGOTTEN_SECONDS = 3600.0  # after that another run, which was killed, is over for this node

logger = logging.getLogger("discreet.client")


class MaskedVector(Protocol):
    """The work of one round of a masked sum: `discreet.node.masked_work.MaskedWork`, or that of a
    guard."""

    @property
    def request(self) -> TrainRequest:
        """The request, with its guarantees."""

    @property
    def sums(self) -> SecureSum:
        """The masked sum, by this node's own count."""

    def vector(self, begin: Release) -> NDArray[np.int64]:
        """The noised vector (length,). Refused before anything is computed. `begin`, called before
        that, has `release` charge the sum if it was not yet."""

    def release(self) -> None:
        """Charges the sum. Refused: a budget would be exceeded."""

    def report(self, size: int) -> None:
        """Logs what has left, with its size in bytes."""


def answer_masking(
    content: RecordDict,
    node_config: Mapping[str, object],
    *,
    work: Callable[[], MaskedVector],
    guarded: bool = False,
) -> RecordDict:
    """The reply to a masking request: this node's identity, its part of one or two stages, or its
    masked vector.

    `work` prepares the masked vector. It is called only if the vector is requested: the other
    stages need no model and no data. `guarded`: a site's guard answers, not an app.

    Raises:
      Refused: the owner has not set the node up for it, a policy or a budget forbids the work, or
        the request is not one that this node answers, by the rules of `discreet.masking.node`.
      MalformedMessage: the message can't be read.
    """
    request, virtual = read_masking(content)
    files = files_of(virtual, node_config)
    identity, directory = _known_identity(files, guarded)
    if request == WHO:
        return member_content(Member(identity.name, directory.names))
    terms, stages = _asked_stages(request, node_config, files)
    # The server chooses the terms. A node signs them with its keys, and no later stage may have
    # other terms. The terms of the masked vector are the node's own, and must be the same.
    masked = None
    if Stage.MASKED in stages:
        masked = work()
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


def _asked_stages(
    request: bytes, node_config: Mapping[str, object], files: MembershipFiles
) -> tuple[Terms, set[Stage]]:
    """The terms of a request, and the stages that it asks for. Refused: it can't be read, or the
    owner does not allow such a sum."""
    try:
        terms, parts = read_request(request)
    except MalformedBytes as error:
        raise Refused(f"malformed: {error}") from error
    stages = {part.stage for part in parts}
    if Stage.KEYS in stages:
        # A node gives no keys for a sum that its owner does not allow.
        check_sums(policy_from(node_config), colluding=terms.colluding, summands=terms.summands)
        forget(files.state, but=terms.run)
    return terms, stages


def _known_identity(files: MembershipFiles, guarded: bool) -> tuple[Identity, Directory]:
    """The node's identity and the list of its peers. Refused: they can't be used; the log of the
    node says why, and not the server's."""
    try:
        return read_identity(files, guarded=guarded)
    except IdentityError as error:
        logger.error("%s", error)
        raise Refused(
            "this node's key or its list of peers can't be used; its log says why"
        ) from error


def _no_work(*_: object) -> NoReturn:
    raise MaskingRefused("a masked vector is requested without the work")


def read_identity(files: MembershipFiles, *, guarded: bool = False) -> tuple[Identity, Directory]:
    """A node's name and private key, and all nodes' public keys, which the owners have compared.

    Raises:
      IdentityError: a file is missing or invalid, the list has another key for this node, or
        `check_guards` raises it.
    """
    identity = Identity.read(files.name, files.key)
    directory = Directory.read(files.peers)
    if not directory.has(identity):
        raise IdentityError(
            f"{files.peers} must also have the public key of {files.name!r}, this node"
        )
    check_guards(identity, directory, guarded=guarded)
    return identity, directory


def check_guards(identity: Identity, directory: Directory, *, guarded: bool) -> None:
    """Raises IdentityError if a guard would share a sum with a node without a guard, or if an app
    would use a guard's key.

    A guard relies on the noise of the other sites. An unreviewed app can add any vector and has its
    node's key, so keys that only guards may use have names of their own.
    """
    if not guarded and identity.name.endswith(GUARD):
        raise IdentityError(f"the key of {identity.name} belongs to a guard, and no app may use it")
    others = [name for name in directory.names if not name.endswith(GUARD)]
    if guarded and others:
        raise IdentityError(
            f"a guard only shares sums with other guards, whose names end in {GUARD}: "
            f"its list of peers has {others[0]}"
        )


def forget(folder: Path, *, but: str, now: float | None = None) -> None:
    """Ends other runs in a node's state that have been idle for an hour because they were killed.
    Their secrets are erased.

    The remaining state records that the run is over. If nodes forgot a round that they have opened,
    they would open it again, and a node whose shares neither sum needed would pay for only one of
    them.
    """
    if now is None:
        now = time.time()
    store = FolderStore(folder)
    for path in folder.glob("*.state"):
        if path.stem != but and now - path.lstat().st_mtime > FORGOTTEN_SECONDS:
            with (
                suppress(MaskingRefused),
                store.locked(path.stem),
            ):  # refused: another process answers right now
                if store.load(path.stem) != OVER:
                    store.save(path.stem, OVER)


def files_of(virtual: VirtualClient | None, node_config: Mapping[str, object]) -> MembershipFiles:
    """The files of a node, named by its own `--node-config`, or of a virtual client. Refused: they
    are not named, or this is not a simulation."""
    if virtual is not None:
        folder = Path(virtual.state_folder)
        if not is_simulations(node_config, folder, virtual.ticket):
            raise Refused(
                "the masking request names a virtual client, but this node is not part "
                "of a simulation"
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
