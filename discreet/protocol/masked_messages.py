"""Messages of a masked sum: bytes of `discreet.masking` in a separate record.

The stage that asks for a masked vector is sent with the train request and the parameters; the other
stages are sent alone. An empty request asks a node for its name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, RecordDict

from discreet.masking.wire import Terms
from discreet.protocol.messages import (
    MASKING,
    MalformedMessage,
    TrainRequest,
    VirtualClient,
    read_canonical,
)
from discreet.settings.client_settings import ClientSettings
from discreet.settings.rules import settings_json

if TYPE_CHECKING:
    from discreet.privacy.secure_grid import SecureSum

WHO = b""
# The record of a train request beside another app's records, and its keys.
ASKED = "masking-train-request"
FROZEN = "frozen-arrays"
MASKING_REPLY = "reply"
NAME = "name"
PEERS = "peers"
_REQUEST = "request"
_VIRTUAL = "virtual"


@dataclass(frozen=True)
class Member:
    """A node's answer to an empty request: its name and those of its peers."""

    name: str
    peers: tuple[str, ...]


def terms_of(name: str, run: ClientSettings, sums: SecureSum) -> Terms:
    """The terms of a run's masked sums. The server and each node derive them independently from the
    run's settings."""
    nodes = run.user.population_size
    secure = run.secure
    counts = (nodes, secure.dropouts, secure.colluding, secure.threshold_of(nodes))
    settings = hashlib.sha256(f"{settings_json(run)}{sums!r}".encode()).hexdigest()
    return Terms(name, *counts, sums.bits, sums.length, sums.variance, settings=settings)


def asked_bytes(request: TrainRequest) -> bytes:
    """The request of one round as bytes. It is not part of the terms, as its clip norm is unknown
    when its keys are made."""
    work = request.work
    return json.dumps([request.round, float(request.clip_norm), work.trains, work.query]).encode()


def masking_record(request: bytes, virtual: VirtualClient | None) -> ConfigRecord:
    """Makes the record of a request to a node; in a simulation it names the virtual client."""
    return ConfigRecord(
        {_REQUEST: request, **({} if virtual is None else {_VIRTUAL: settings_json(virtual)})}
    )


def split_content(content: RecordDict) -> tuple[dict[str, object], tuple[str, ...]]:
    """The encoded train request beside another app's records, and the patterns of its frozen
    arrays.

    Removes both and the masking record from `content`, which leaves the app's own records.

    Raises:
      MalformedMessage: there is no train request.
    """
    record = content.pop(ASKED, None)
    del content[MASKING]
    if not isinstance(record, ConfigRecord):
        raise MalformedMessage("the message holds no train request of this version of Discreet")
    items: dict[str, object] = dict(record)
    frozen = items.pop(FROZEN, None)
    if isinstance(frozen, list):
        patterns = tuple(str(each) for each in frozen)
    else:
        patterns = ()
    return items, patterns


def read_masking(content: RecordDict) -> tuple[bytes, VirtualClient | None]:
    """Reads what `masking_record` wrote.

    Raises:
      MalformedMessage: it holds something else.
    """
    record = content.get(MASKING)
    left: dict[str, object] = dict(record) if isinstance(record, ConfigRecord) else {}
    request = left.pop(_REQUEST, None)
    which = "which virtual client to be"
    if _VIRTUAL in left:
        virtual = read_canonical(VirtualClient, left.pop(_VIRTUAL), which)
    else:
        virtual = None
    if not isinstance(request, bytes) or left:
        raise MalformedMessage("the message holds no masking request of this version of Discreet")
    return request, virtual


def reply_content(reply: bytes) -> RecordDict:
    return RecordDict({MASKING: ConfigRecord({MASKING_REPLY: reply})})


def member_content(member: Member) -> RecordDict:
    """Makes the answer of a node that is asked for its name."""
    return RecordDict({MASKING: ConfigRecord({NAME: member.name, PEERS: list(member.peers)})})
